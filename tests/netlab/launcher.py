"""mpirun, as the hosts of a lab need it, by the library that it belongs to."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Launcher:
    """The mpirun of Open MPI, or the Hydra of MPICH and Intel MPI.

    Attributes:
        mpirun: its path.
        open_mpi: whether it is Open MPI's.
    """

    mpirun: str
    open_mpi: bool

    @classmethod
    def beside_python(cls) -> "Launcher":
        folder = Path(sys.executable).parent
        path = str(folder / "mpirun")
        environ = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
        asked = subprocess.run([path, "--version"], env=environ, capture_output=True, text=True)
        return cls(path, "Open MPI" in asked.stdout)

    @property
    def slots(self) -> str:
        """The text between a host and its number of ranks in a hostfile."""
        return " slots=" if self.open_mpi else ":"

    def environ(self, remote_shell: str, interface: str) -> dict[str, str]:
        """Return variables with which it reaches hosts by `remote_shell`, also under a launch script.

        Hydra passes them to the ranks, so they also say that these have TCP on `interface` alone.
        """
        if self.open_mpi:
            return {
                "OMPI_MCA_plm_rsh_agent": remote_shell, "PRTE_MCA_plm_ssh_agent": remote_shell,
                "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            }  # fmt: skip
        return {
            "HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": remote_shell,
            "I_MPI_HYDRA_BOOTSTRAP": "ssh", "I_MPI_HYDRA_BOOTSTRAP_EXEC": remote_shell,
            "PATH": f"{Path(self.mpirun).parent}{os.pathsep}{os.environ['PATH']}",
            "MPIR_CVAR_CH4_NETMOD": "ofi",  # UCX, MPICH's first choice, does not see a lab's network devices
            "I_MPI_FABRICS": "ofi",  # otherwise memory that is shared: Intel MPI sees one machine
            "FI_PROVIDER": "tcp", "FI_TCP_IFACE": interface,
        }  # fmt: skip

    def command(self, hostfile: str, ranks: int, interface: str) -> list[str]:
        """Return the command before the program: messages go over TCP on `interface` alone."""
        if not self.open_mpi:
            return [self.mpirun, "-machinefile", hostfile, "-iface", interface, "-n", str(ranks)]
        # Ranks that wait leave the processor, which in truth is one for all hosts, to the others.
        return [
            self.mpirun, "--hostfile", hostfile, "-n", str(ranks), "--bind-to", "none",
            "--mca", "mpi_yield_when_idle", "1",
            "--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", interface,
            "-x", "PYTHONPATH", "-x", "GLOO_SOCKET_IFNAME", "-x", "OMP_NUM_THREADS",
        ]  # fmt: skip
