"""What a GPU is: the catalogue, this machine, and what runs natively on either."""
