"""The public path of `View` and `Plan` for user-written policies; the code is in `state.plan`."""

from reference_engine.state.plan import BadTokenCount as BadTokenCount
from reference_engine.state.plan import Cause as Cause
from reference_engine.state.plan import DuplicateItem as DuplicateItem
from reference_engine.state.plan import How as How
from reference_engine.state.plan import Item as Item
from reference_engine.state.plan import Limits as Limits
from reference_engine.state.plan import NoProgress as NoProgress
from reference_engine.state.plan import OverLimit as OverLimit
from reference_engine.state.plan import Plan as Plan
from reference_engine.state.plan import PlanError as PlanError
from reference_engine.state.plan import Preemption as Preemption
from reference_engine.state.plan import UnknownRequest as UnknownRequest
from reference_engine.state.plan import View as View
from reference_engine.state.plan import Why as Why
from reference_engine.state.plan import check_plan as check_plan
