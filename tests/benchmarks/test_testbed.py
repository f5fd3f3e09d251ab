"""The testbed: profiles become sleeping models, and plans run on them over hosts and links that are
made for it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from benchmarks.kept import ROOT
from benchmarks.netns import shaped_network
from benchmarks.testbed import compressed, layers
from benchmarks.testbed.bed import testbed
from benchmarks.testbed.emulate import Scale, as_chain, emulate, fitting_scale, joined
from benchmarks.testbed.measure import data_parallel_run, described, run_plan
from benchmarks.testbed.predict import balanced_stages, given_plan, simulated_s
from planner.executor.stage.split_backward import input_gradients
from planner.formats.cluster import flat_cluster, hierarchical_cluster
from planner.formats.profile import Profile
from planner.units import parse_bandwidth
from tests.benchmarks.test_netns import NAMESPACES, transfer_s
from tests.samples import layer, profile

CHAIN = profile(
    *(layer(f"l{k}", 0.01 * (k + 1), 0.02 * (k + 1), 4_000, 8_000) for k in range(5)),
    layer("end", 0.01),
)


def total_s(of: Profile) -> float:
    return sum(each.forward_s + each.backward_s + each.update_s for each in of.layers)


def test_a_branching_profile_becomes_a_chain_of_what_crosses_its_cuts() -> None:
    branching = profile(
        layer("a", output_bytes=100, weight_bytes=8),
        layer("b", output_bytes=10),
        layer("c", output_bytes=1),
        edges=[("a", "b"), ("a", "c"), ("b", "c")],
        no_cut_after=(),
    )
    assert [block.output_bytes for block in as_chain(branching)] == [100, 110, 0]
    uncut = branching.model_copy(update={"no_cut_after": ("a",)})
    first, last = as_chain(uncut)
    assert (first.forward_s, first.backward_s, first.weight_bytes, first.output_bytes) == (
        2.0,
        4.0,
        8,
        110,
    )
    assert last.forward_s == 1.0


def test_small_neighbours_are_joined_first() -> None:
    blocks = joined(as_chain(CHAIN), 3)
    assert len(blocks) == 3
    assert sum(block.forward_s for block in blocks) == pytest.approx(
        sum(each.forward_s for each in CHAIN.layers)
    )
    # not 0.05 with all behind it
    assert max(block.forward_s for block in blocks) == pytest.approx(0.09)


def test_the_emulated_profile_has_the_scaled_times_and_bytes(tmp_path: Path) -> None:
    emulated = emulate(CHAIN, Scale(time_factor=10.0, byte_factor=0.5), tmp_path)
    assert total_s(emulated.profile) == pytest.approx(10 * total_s(CHAIN))
    assert [each.weight_bytes for each in emulated.profile.layers] == [4000] * 5 + [4, 0]
    assert [each.outputs[0].output_bytes for each in emulated.profile.layers[:5]] == [2000] * 5
    assert all(each.outputs[0].gradient_bytes == 2000 for each in emulated.profile.layers[:5])


def test_links_are_scaled_like_bytes_and_times() -> None:
    there = hierarchical_cluster((2, 2), (4e9, 1e9))
    scale = fitting_scale(CHAIN, there, 1e6)
    assert scale.time_factor * total_s(CHAIN) == pytest.approx(1.0)
    assert [level.bandwidth_bytes_per_s for level in scale.cluster(there).levels] == pytest.approx(
        [4e6, 1e6]
    )
    assert scale.byte_factor / scale.time_factor == pytest.approx(1e6 / 1e9)


def test_given_plans_are_priced_and_simulated_alike() -> None:
    links = flat_cluster(4, 1e6)
    stages = balanced_stages(CHAIN, 2)
    plan = given_plan(CHAIN, links, stages, (2, 2))
    assert plan.config == "2-2"
    assert simulated_s(plan) == pytest.approx(plan.predicted.seconds_per_minibatch, rel=1e-6)
    flushed = given_plan(CHAIN, links, stages, (1, 1), "1f1b-flush", 8)
    assert simulated_s(flushed) == pytest.approx(flushed.predicted.seconds_per_minibatch, rel=1e-6)


def test_an_all_reduce_slows_messages_on_its_links_without_stopping_them() -> None:
    links = flat_cluster(4, 2e6)
    plan = given_plan(CHAIN, links, balanced_stages(CHAIN, 2), (3, 1))
    assert simulated_s(plan) >= plan.predicted.bottleneck.busy_s * 0.999
    assert plan.solver.cost_model_s is not None
    assert simulated_s(plan) < 1.5 * plan.solver.cost_model_s


@pytest.mark.usefixtures("namespaces")
def test_servers_share_their_uplink() -> None:
    count = 6_000_000
    with shaped_network(4, "64kb") as net:
        net.shape("400mbit", 2, "50mbit")
        within_s = transfer_s(net.hosts[0], net.hosts[1], count)
        assert (count - 500_000) * 8 / transfer_s(net.hosts[0], net.hosts[2], count) < 50e6
        net.shape("400mbit")
        assert transfer_s(net.hosts[0], net.hosts[2], count) < count * 8 / 50e6
        assert within_s < count * 8 / 50e6


@pytest.mark.usefixtures("namespaces")
@pytest.mark.slow
def test_a_plan_and_data_parallelism_run_about_as_fast_as_predicted(tmp_path: Path) -> None:
    """The machine may be busy, so the bound is loose; without sleeping, the run would be many times
    faster.
    """
    with testbed(2) as bed:
        there = flat_cluster(2, 1e6)
        emulated = emulate(CHAIN, fitting_scale(CHAIN, there, 4e6), tmp_path)
        links = bed.links(flat_cluster(2, 4e6), 200_000)
        assert links.levels[0].bandwidth_bytes_per_s < 4.2e6
        plan = given_plan(emulated.profile, links, balanced_stages(emulated.profile, 2), (1, 1))
        run = run_plan(bed, emulated, plan, described(links), seconds=3)
        assert run.measured_s > 0.9 * run.predicted_s
        bsp = data_parallel_run(bed, emulated, links, 1.0)
        assert bsp.measured_s > 0.45  # half of a whole minibatch


@contextmanager
def running_testbed() -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """A process that keeps a testbed open, the beginning of its hosts' names, and its nursery's
    number.
    """
    code = (
        "import time\nfrom benchmarks.testbed.bed import testbed\nwith testbed(2) as bed:\n"
        "    print(bed.network.hosts[0].name, bed.nursery.pid, flush=True)\n    time.sleep(120)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        name, nursery = process.stdout.readline().split()
        yield process, name.removesuffix("-host0"), int(nursery)


@pytest.mark.usefixtures("namespaces")
def test_a_killed_testbed_leaves_no_process_and_the_next_one_removes_its_hosts() -> None:
    with running_testbed() as (process, run, nursery):
        children = Path(f"/proc/{nursery}/task/{nursery}/children").read_text().split()
        assert len(children) == 2
        process.kill()
        process.wait(timeout=20)
    with shaped_network(1):
        assert not list(NAMESPACES.glob(f"{run}-*"))
    for number in (nursery, *map(int, children)):
        state = Path(f"/proc/{number}/stat")
        # ended; its parent has not looked yet
        assert not state.exists() or state.read_text().split()[2] == "Z"


def test_a_split_backward_takes_as_long_as_a_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[float] = []
    monkeypatch.setattr(layers.DEVICE, "compute", taken.append)
    model = layers.build_model(
        [layers.Block(1.0, 8.0, 0.0, 40, 40), layers.Block(2.0, 20.0, 0.0, 40, 40)], 1
    )
    received = torch.zeros(1, 10, requires_grad=True)
    whole = model(received)
    assert taken == [1.0, 2.0]
    taken.clear()
    whole.sum().backward()
    # each layer's weight before the next layer, as buckets expect
    assert taken == [10.0, 10.0, 4.0, 4.0]
    taken.clear()
    received = torch.zeros(1, 10, requires_grad=True)
    output = model(received)
    rest = input_gradients(
        [get_gradient_edge(output)], [torch.ones_like(output)], [received], model.parameters()
    )
    assert taken[2:] == [10.0, 4.0]
    taken.clear()
    rest.run()
    assert taken == [10.0, 4.0]
    taken.clear()
    model(torch.zeros(1, 10)).sum().backward()  # the first layer has no gradient of its input
    assert taken[2:] == [10.0, 10.0, 8.0]


def test_drawn_cases_that_compress_have_stages_that_send_over_slow_links() -> None:
    cases = compressed.draw(1, 40)
    assert compressed.draw(1, 10) == cases[:10]
    assert {case.compress for case in cases} == {"bfloat16", "int8"}
    assert all(case.chunks > 1 or len(case.config or ()) > 1 for case in cases)
    assert {case.bandwidths[-1] for case in cases} == {"80Mbps", "100Mbps", "200Mbps", "300Mbps"}
    two_levels = [case for case in cases if len(case.sizes) == 2]
    ratios = {
        parse_bandwidth(case.bandwidths[0]) / parse_bandwidth(case.bandwidths[1])
        for case in two_levels
    }
    assert ratios == {2.0, 4.0}
