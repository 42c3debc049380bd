"""Users and a load shape of the user's own locustfile, beside a run of slobench:
`locust -f $(slobench locustfile),own.py`.

Locust starts one shape and divides its users among all classes. slobench's shape therefore adds the
own users to its idle users: as many as the own shape states at the moment, else `--users` of them
at `--spawn-rate`.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Sequence
from typing import Any

import gevent
from locust import FastHttpUser, HttpUser, LoadTestShape, User
from locust.env import Environment

from loadgen.errors import UsageError
from targets.address import is_url

Tick = tuple[int, list[type[User]] | None]  # own users, and their classes if not all


class IdleUser(User):
    """Locust requires a user on each worker during a test; this user sends nothing."""

    functions = True  # Locust then accepts a class without tasks, which `--tags` leaves behind

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.tasks = [IdleUser.idle]

    def idle(self) -> None:
        gevent.sleep(3600)


class Beside:
    """The own users during a run. `shape` is the own shape, if there is one; `n_users` and
    `users_per_s` are `--users` and `--spawn-rate`, None where they are not given."""

    def __init__(
        self,
        classes: Sequence[type[User]] = (),
        shape: LoadTestShape | None = None,
        n_users: int | None = None,
        users_per_s: float | None = None,
    ) -> None:
        self._classes, self._shape = classes, shape
        self._n_fixed = sum(own.fixed_count for own in classes)
        has_weighted = any(not own.fixed_count for own in classes)
        self._n_users = self._n_fixed + has_weighted if n_users is None else n_users
        self._users_per_tick = users_per_s or 1.0
        self._now = 0.0
        self._is_over = False

    @classmethod
    def of(cls, environment: Environment) -> Beside:
        """Those of an environment. Raises UsageError, with the reason, for classes and shapes that
        cannot run beside a run."""
        options: Namespace = environment.parsed_options
        classes = [own for own in environment.user_classes if own is not IdleUser]
        shapes = own_shapes(environment)
        names = ", ".join(own.__name__ for own in classes)
        if len(shapes) > 1:
            listed = " and ".join(sorted(type(shape).__name__ for shape in shapes))
            raise UsageError(f"{listed}: one LoadTestShape can run beside slobench's; remove one")
        if shapes and not classes:
            name = type(shapes[0]).__name__
            raise UsageError(f"{name}: a LoadTestShape without a User class of its own")
        for own in classes:
            if _is_http(own) and not own.host and not is_url(options.host or ""):
                raise UsageError(
                    f"{own.__name__}: has no host, and --host {options.host or '(none)'} is no "
                    f"URL; set {own.__name__}.host"
                )
        n_fixed = sum(own.fixed_count for own in classes)
        stated = options.num_users if classes else None
        if stated is not None and n_fixed > stated and not shapes:
            raise UsageError(
                f"{names}: their fixed_count is {n_fixed} and --users is {stated}; raise --users"
            )
        return cls(classes, shapes[0] if shapes else None, stated, options.spawn_rate)

    def reset(self) -> None:
        """Begins the users of another run."""
        self._now, self._is_over = 0.0, False
        if self._shape is not None:
            self._shape.reset_time()

    def tick(self) -> Tick:
        """The own users from now on; called once a second."""
        target, rate, classes = float(self._n_users), self._users_per_tick, None
        if self._shape is not None:
            stated = None if self._is_over else self._shape.tick()
            self._is_over = stated is None
            if stated is None:
                target, rate = 0.0, float("inf")
            else:
                target, rate = float(stated[0]), float(stated[1])
                classes = list(stated[2]) if len(stated) > 2 and stated[2] else None
        step = min(rate, abs(target - self._now))
        self._now += step if target > self._now else -step
        return int(self._now), classes


def own_shapes(environment: Environment) -> list[LoadTestShape]:
    """The shapes of the locustfiles that are not slobench's."""
    available: Iterable[Any] = (environment.available_shape_classes or {}).values()
    shapes = [*available, environment.shape_class]
    found = {id(shape): shape for shape in shapes if shape is not None}
    return [shape for shape in found.values() if not getattr(shape, "is_slobench", False)]


def has_own_classes() -> bool:
    """Whether the locustfiles define users besides slobench's."""
    waiting, found = [User], set[type[User]]()
    while waiting:
        below = waiting.pop().__subclasses__()
        waiting += below
        found.update(own for own in below if not own.abstract)
    return bool(found - {IdleUser})


def _is_http(own: type[User]) -> bool:
    return issubclass(own, HttpUser | FastHttpUser)
