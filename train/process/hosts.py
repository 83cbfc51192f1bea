"""The processes of a run on several hosts: how they connect, agree and share the writing."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TypeVar, cast

import jax
import numpy as np
from jax.experimental import multihost_utils

from jax_models.options import CheckedFields, Index
from train.process.digest import bytes_digest
from twinscan.command_line import CommandLineError

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class HostsConfig(CheckedFields):
    """The processes of a run on several hosts. Run the same command on each host, with --out."""

    join: bool = False
    """Join the processes that the environment of a TPU pod or of SLURM lists."""
    coordinator: str | None = None
    """HOST:PORT of process 0, if the environment does not provide it."""
    num_processes: int | None = None
    """The number of processes, with --hosts.coordinator."""
    process_id: Index | None = None
    """The index of this process, counted from 0, with --hosts.coordinator."""

    def __post_init__(self):
        """Checks each field, and that an address is complete."""
        super().__post_init__()
        given = self.coordinator, self.num_processes, self.process_id
        if len({each is None for each in given}) > 1:
            raise ValueError(
                "hosts: expected coordinator, num_processes and process_id, or none of them"
            )


def join(config: HostsConfig) -> None:
    """Connects to the other processes, before JAX starts its devices.

    Raises:
        CommandLineError: the processes cannot connect, or the environment does not list them.

    """
    if not config.join and config.coordinator is None:
        return
    try:
        jax.distributed.initialize(config.coordinator, config.num_processes, config.process_id)
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CommandLineError(f"--hosts: the processes could not connect: {reason}") from None
    # Start the devices now. Later, they would not wait for a process that reads a long text.
    jax.devices()


def is_first() -> bool:
    """Whether this process writes the files."""
    return jax.process_index() == 0


def gather_all(numbers: list[int]) -> np.ndarray:
    """Gathers the numbers of each process: (process, number)."""
    if jax.process_count() == 1:
        return np.array([numbers])
    return np.asarray(multihost_utils.process_allgather(np.array(numbers, np.int32)))


def run_on_all(action: Callable[[], T]) -> T:
    """Runs an action in every process, and returns its result once all of them have succeeded.

    Raises:
        CommandLineError, OSError: the action raised it in this process.
        CommandLineError: the action failed in another process.

    """
    result, refusal = None, None
    try:
        result = action()
    except (CommandLineError, OSError) as error:
        refusal = error
    refused = np.flatnonzero(gather_all([refusal is not None]))
    if refusal is not None:
        raise refusal
    if len(refused):
        raise CommandLineError(f"--hosts: process {refused[0]} has stopped; see its output")
    return cast(T, result)


def run_on_first(action: Callable[[], None]) -> None:
    """Runs an action in the first process, while the others wait."""
    run_on_all(lambda: action() if is_first() else None)


def check_agreement(values: Mapping[str, str]) -> None:
    """Checks that the processes have the same values.

    Raises:
        CommandLineError: two processes differ; the error names them and the value.

    """
    digests = [
        int.from_bytes(bytes_digest(value.encode()).digest()[:4], "big", signed=True)
        for value in values.values()
    ]
    found = gather_all(digests)
    for name, column in zip(values, found.T, strict=True):
        for process in np.flatnonzero(column != column[0]):
            raise CommandLineError(f"--hosts: processes 0 and {process} differ in their {name}")
