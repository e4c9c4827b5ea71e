"""One configuration answered, many searched, and the answer in words."""
