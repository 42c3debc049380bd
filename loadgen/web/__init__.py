"""Locust's page, master and workers around the load generator of `slobench run`.

Locust's processes carry messages and draw the page; they never send a request. A plain process next
to the master controls the run (`control_process`), and a plain process next to each worker sends
the requests (`load_process`). Neither imports locust or gevent, which patch the process.
"""
