"""The OpenAI bodies the server reads and writes, by example and not by schema.

Written apart from the client's codecs on purpose, so that a misunderstanding cannot cancel itself
out.
"""
