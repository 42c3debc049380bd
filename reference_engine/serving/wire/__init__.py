"""Request and response bodies of the OpenAI API, written by hand rather than from a schema.

The load generator has its own codecs in `targets`. The two share no code on purpose: a
misunderstanding of the API cannot cancel out between client and server.
"""
