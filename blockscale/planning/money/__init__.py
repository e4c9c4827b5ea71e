"""Power, energy, racks and cost, and what they assume."""
