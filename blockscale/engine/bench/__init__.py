"""How fast the engine is on this machine: requests one by one and under load, against what memory could give."""
