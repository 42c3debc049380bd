"""Locust's page and Locust's master and workers around the load generator of `slobench run`.

Locust's processes carry messages and draw the page; they never send a request. The run itself is
conducted by a plain process beside the master (`conductor`), and the load comes from a plain
process beside each worker (`generator`): neither imports locust or gevent, which patch the process.
"""
