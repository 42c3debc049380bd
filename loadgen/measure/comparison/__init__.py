"""Two sides against each other: paired runs, several runs, single runs, and the verdict."""
