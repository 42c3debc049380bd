"""Prediction of answer lengths from earlier answers, without a model."""
