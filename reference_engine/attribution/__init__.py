"""The cause of each missed SLO, found by simulating the same requests under other conditions."""
