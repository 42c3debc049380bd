"""How much a target can take: what is asked, the search, and the files it rests on."""
