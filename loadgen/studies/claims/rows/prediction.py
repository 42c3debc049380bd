"""Prediction and learning."""

from __future__ import annotations

from loadgen.studies.claims import exact
from loadgen.studies.claims.claim import Claim, Drawn
from loadgen.studies.claims.rows.sides import untested

PREDICTION: tuple[Claim, ...] = (
    Claim(
        "predictor-refresh",
        "ARES: predictions refreshed while decoding",
        "D",
        "mean absolute error −49.42 %",
        "heavy-tailed answers, 2 000 learned: histogram predictor refreshed every 32 tokens over "
        "its prediction at arrival, error of the remaining tokens",
        Drawn(exact.refreshed_error),
        "change",
        (0.75, 0.85),
        "What refreshing alone is worth, without a model. The claim compares a probe of hidden "
        "states with auxiliary models.",
    ),
    untested(
        "hidden-state-probe",
        "ARES: probe of hidden states",
        "D",
        "mean absolute error −49.42 %",
        "Not testable with random weights: their hidden states carry no length.",
    ),
    untested(
        "ares-goodput",
        "ARES/STAR",
        "D",
        "2.24 × throughput",
        "The paper's number is goodput with a trained predictor on real chats; without one, see "
        "the row on moving requests.",
    ),
    untested(
        "semantic-prediction",
        "semantic, context and user prediction",
        "D",
        "fused prediction of lengths",
        "Not testable with generated prompts: their text means nothing. Tenant, prompt length and "
        "max_tokens are what the predictor here uses.",
    ),
    untested(
        "predictive-paging",
        "predictive paging and recycling",
        "D",
        "blocks allocated ahead of need",
        "Blocks take no time to allocate in the simulator, so there is nothing to win; "
        "`reserve=predicted` admits by predicted lengths.",
    ),
    untested(
        "compression-aware",
        "compression-aware scheduling",
        "D",
        "the scheduler knows what is compressed",
        "The engine has one KV format at a time.",
    ),
    untested(
        "phase-switching",
        "smart switching of phases",
        "D",
        "least jitter when phases switch",
        "A mixed step has no phases to switch; a switch of policies by load has no mode here.",
    ),
    untested(
        "prefix-preload",
        "predictive preload, prefixes across nodes",
        "D",
        "prefixes prepared ahead and shared",
        "No mode here: a prefix is cached when it was computed, per replica.",
    ),
    untested(
        "learning-scheduler",
        "online and reinforcement learning of schedules",
        "D",
        "learns from every decision",
        "No mode here that learns while it serves; tables are solved ahead (`slobench solve`).",
    ),
    untested(
        "tgi-ratio",
        "TGI: waiting-served ratio",
        "A",
        "dynamic batching as a standard, no number",
        "No claim with a number, and no mode here with this rule.",
    ),
)
