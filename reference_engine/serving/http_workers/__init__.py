"""HTTP in processes of their own; `processes` starts them."""
