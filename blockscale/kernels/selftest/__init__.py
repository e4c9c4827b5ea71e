"""Each kernel held against plain torch and float64 on the machine that it is to serve."""
