"""Many cells at once: what varies, the runs, and the table, figures and front that come of them."""
