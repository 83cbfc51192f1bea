"""The TPU compiler, libtpu, in a separate folder, so that jax does not use it to find TPUs."""

import importlib.metadata
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from packaging.requirements import Requirement

from twinscan.command_line import CommandLineError

ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_LOG_DIR": "disabled",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
"""Keeps libtpu from querying the TPU that it runs on, and from waiting for other processes."""


class Topology(NamedTuple):
    """Connected chips, as devices to compile for."""

    name: str
    chips: list[Any]


def requirement() -> Requirement:
    """The version of libtpu that the installed jax requires."""
    of_jax = map(Requirement, importlib.metadata.requires("jax") or ())
    return next(r for r in of_jax if r.name == "libtpu")


def folder() -> Path:
    """The folder in which `make tpu-compile` installs libtpu."""
    return Path(sys.prefix) / "tpu"


def load() -> str:
    """Makes the compiler available to jax, and returns its version.

    Raises:
        CommandLineError: libtpu is not installed, or does not fit this version of jax.

    """
    library = folder() / "libtpu" / "libtpu.so"
    installed = importlib.metadata.distributions(name="libtpu", path=[str(folder())])
    found = next((distribution.version for distribution in installed), None)
    if found is None or not library.is_file():
        raise CommandLineError(f"{folder()}: no libtpu; `make tpu-compile` installs it")
    if found not in requirement().specifier:
        raise CommandLineError(
            f"{folder()}: expected libtpu{requirement().specifier} for jax {jax.__version__}, got "
            f"{found}; remove the folder and `make tpu-compile` installs it"
        )
    os.environ |= ENVIRONMENT | {"TPU_LIBRARY_PATH": str(library)}
    jax.config.update("jax_platforms", "cpu")
    return found


def topology(name: str) -> Topology:
    """The topology of a name such as v5e:2x4.

    Raises:
        CommandLineError: the compiler does not start, or does not know the name.

    """
    of_one = {"chips_per_host_bounds": [1, 1, 1]} if name.endswith(":1x1") else {}
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=name, **of_one)
    except jax.errors.JaxRuntimeError as error:
        raise CommandLineError(f"libtpu: {str(error).splitlines()[0]}") from error
    return Topology(name, found.devices)


if __name__ == "__main__":
    print(f"libtpu{requirement().specifier}")
