"""Attribution of missed SLOs to causes, by simulating the same requests under other conditions."""
