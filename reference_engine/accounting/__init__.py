"""Records of waiting: seconds per cause, who displaced whom, totals per tenant."""
