"""Each op in plain torch on `formats/`: what always works, and what the self-tests hold a kernel against."""
