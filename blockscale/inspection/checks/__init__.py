"""What lint looks at: each file a kind of fault. `blockscale.inspection.lint` joins them."""
