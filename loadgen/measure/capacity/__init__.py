"""The highest load that meets the SLO: probe results, the attainment curve through them, and the
choice of the next probe. Pure: probes in, the next probe or the result out."""
