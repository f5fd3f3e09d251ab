"""PipeDream's published configurations, copied from the two papers.

    arXiv   Harlap et al., "PipeDream: Fast and Efficient Pipeline Parallel DNN Training",
            arXiv 1806.03377, Table 1
    SOSP    Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training",
            SOSP 2019, Table 1

The first gives speed-ups over one machine and over data parallelism (BSP), the second only over
data parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.formats.cluster import Cluster, flat_cluster, hierarchical_cluster
from planner.units import parse_bandwidth

TITAN_X = "titan-x"  # 12 GB; the papers do not say which Titan X, so we assume Maxwell's


@dataclass(frozen=True)
class Site:
    """A kind of cluster: servers of `gpus` devices, with links of `inner` inside and `outer`
    between servers.
    """

    name: str
    device: str
    gpus: int
    inner: str
    outer: str

    def cluster(self, servers: int, memory_bytes: int | None, factor: float = 1.0) -> Cluster:
        """Return a cluster of this many servers, all links `factor` times as fast."""
        outer = parse_bandwidth(self.outer) * factor
        inner = parse_bandwidth(self.inner) * factor
        if self.gpus == 1:
            return flat_cluster(servers, outer, memory_bytes)
        if servers == 1:
            return flat_cluster(self.gpus, inner, memory_bytes)
        return hierarchical_cluster((self.gpus, servers), (inner, outer), memory_bytes)


# Links inside a server: about 12 GB/s for PCIe 3.0 x16, and 25 GB/s each way for NVLink 2.
ARXIV_A = Site("A: Titan X, 25 Gbps", TITAN_X, 1, "25Gbps", "25Gbps")
ARXIV_B = Site("B: V100, 10 Gbps", "v100", 1, "10Gbps", "10Gbps")
SOSP_A = Site("A: 4 x V100 PCIe, 10 Gbps", "v100-pcie", 4, "12GB/s", "10Gbps")
SOSP_B = Site("B: 8 x V100 NVLink, 25 Gbps", "v100", 8, "25GB/s", "25Gbps")
SOSP_C = Site("C: Titan X, 40 Gbps", TITAN_X, 1, "40Gbps", "40Gbps")


@dataclass(frozen=True)
class Row:
    """One line of a published table.

    Attributes:
        table: "arXiv" or "SOSP".
        model: key of `MODELS`.
        minibatch: samples per GPU.
        site: kind of cluster.
        servers: how many.
        config: as published; "straight" is one stage per GPU.
        over_one: published speed-up over one machine, if given.
        over_data_parallel: published speed-up over data parallelism.
        communication_cut: published share of data parallelism's communication that is saved, if
            given.
        data_parallel_over_one: published speed-up of data parallelism over one machine, if given.
    """

    table: str
    model: str
    minibatch: int
    site: Site
    servers: int
    config: str
    over_one: float | None
    over_data_parallel: float
    communication_cut: float | None = None
    data_parallel_over_one: float | None = None

    @property
    def name(self) -> str:
        """Model and cluster, for the tables."""
        return f"{self.model}, {self.site.gpus}x{self.servers} ({self.site.name[0]})"

    @property
    def gpus(self) -> int:
        """Number of devices."""
        return self.servers * self.site.gpus

    @property
    def replicas(self) -> tuple[int, ...]:
        """Replicas per stage of the published configuration."""
        if self.config == "straight":
            return (1,) * self.gpus
        return tuple(map(int, self.config.split("-")))


MODELS = {
    "vgg16": "benchmarks/published/configs/models/vgg16.py",
    "resnet50": "benchmarks/published/configs/models/resnet50.py",
    "alexnet": "profiles/alexnet/model.py",
    "inception_v3": "profiles/inception_v3/model.py",
    "gnmt8": "profiles/gnmt8/model.py",
    "gnmt16": "profiles/gnmt16/model.py",
    "s2vt": "profiles/s2vt/model.py",
    "awd_lm": "profiles/awd_lm/model.py",
}

ROWS = (
    Row("arXiv", "vgg16", 32, ARXIV_A, 4, "2-1-1", 3.14, 2.13, 0.90, 1.47),
    Row("arXiv", "vgg16", 32, ARXIV_A, 8, "7-1", 7.04, 2.99, 0.95, 2.35),
    Row("arXiv", "vgg16", 32, ARXIV_A, 16, "9-5-1-1", 9.86, 3.00, 0.91, 3.28),
    Row("arXiv", "vgg16", 32, ARXIV_B, 8, "7-1", 6.98, 5.12, 0.95, 1.36),
    Row("arXiv", "inception_v3", 32, ARXIV_A, 8, "8", 7.66, 1.00, 0.0, 7.66),
    Row("arXiv", "inception_v3", 32, ARXIV_B, 8, "7-1", 6.88, 1.45, 0.47, 4.74),
    Row("arXiv", "s2vt", 80, ARXIV_A, 4, "2-1-1", 3.34, 3.01, 0.95, 1.10),
    # From the text of the same paper: straight pipelines of VGG16.
    Row("arXiv", "vgg16", 32, ARXIV_A, 4, "straight", 2.56, 2.56 / 1.47, None, 1.47),
    Row("arXiv", "vgg16", 32, ARXIV_A, 8, "straight", 3.49, 3.49 / 2.35, None, 2.35),
    Row("SOSP", "vgg16", 64, SOSP_A, 4, "15-1", None, 5.28),
    Row("SOSP", "vgg16", 64, SOSP_B, 2, "15-1", None, 2.98),
    Row("SOSP", "resnet50", 128, SOSP_A, 4, "16", None, 1.0),
    Row("SOSP", "resnet50", 128, SOSP_B, 2, "16", None, 1.0),
    Row("SOSP", "alexnet", 256, SOSP_A, 4, "15-1", None, 4.92),
    Row("SOSP", "alexnet", 256, SOSP_B, 2, "15-1", None, 2.04),
    Row("SOSP", "gnmt16", 64, SOSP_A, 1, "straight", None, 1.46),
    Row("SOSP", "gnmt16", 64, SOSP_A, 4, "straight", None, 2.34),
    Row("SOSP", "gnmt16", 64, SOSP_B, 2, "straight", None, 3.14),
    Row("SOSP", "gnmt8", 64, SOSP_A, 1, "straight", None, 1.5),
    Row("SOSP", "gnmt8", 64, SOSP_A, 3, "straight", None, 2.95),
    Row("SOSP", "gnmt8", 64, SOSP_B, 2, "16", None, 1.0),
    Row("SOSP", "awd_lm", 80, SOSP_A, 1, "straight", None, 4.25),
    Row("SOSP", "s2vt", 80, SOSP_C, 4, "2-1-1", None, 3.01),
)
