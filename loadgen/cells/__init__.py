"""One scenario against one target, measured again and again: a cell, its order, its servers."""
