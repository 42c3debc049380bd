"""The endpoints: codecs per API, a scripted mock server, preflight probes, and the bundled engine
as a child process.
"""
