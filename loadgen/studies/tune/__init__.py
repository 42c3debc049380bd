"""The mode and knobs with the most goodput under an SLO: searched in simulations, confirmed."""
