"""Translation of other tools' command lines into scenarios, one module per tool."""
