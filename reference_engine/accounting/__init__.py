"""Records of waiting: seconds per cause, the cost of jumps in the queue, totals per tenant."""
