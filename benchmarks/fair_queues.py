"""Commands for `tc` that divide a device's rate evenly among TCP streams, acknowledgements first.

Each stream has a queue of its own; a hierarchical token bucket (HTB) serves them in turns, with as
many bytes each. Where windows are large enough to keep every stream's bottleneck busy, all links
together are shared max-min fairly (Hahne 1991, "Round-Robin Scheduling for Max-Min Fairness in Data
Networks").

Packets without data go first. In one queue with data they would wait for streams of the other
direction, and their senders with them (Zhang, Shenker and Clark 1991, "Observations on the Dynamics
of a Congestion Control Algorithm: The Effects of Two-Way Traffic"). `fq_codel`, the default of most
Linux distributions, does the same.
"""

from __future__ import annotations

from collections.abc import Iterator

QUEUES = 512  # a power of two; streams share one if their hashes agree
# In a turn. No packet may be larger, or streams with larger packets would get more. The kernel
# divides packets into frames later, and counts the headers of all.
TURN_BYTES, PACKET_BYTES = 4_600, 4_500
_FIRST = 0x10  # of the queues' class numbers

# Classic BPF on an Ethernet frame with IPv4 and TCP: (code, jump if true, jump if false, constant).
_CLASS_OF_STREAM = (
    (0xB1, 0, 0, 14),  # X = length of the IP header
    (0x50, 0, 0, 26),  # A = byte with the length of the TCP header
    (0x54, 0, 0, 0xF0),
    (0x74, 0, 0, 2),
    (0x0C, 0, 0, 0),
    (0x07, 0, 0, 0),  # X = length of both headers
    (0x28, 0, 0, 16),  # A = length of the packet
    (0x1D, 0, 1, 0),  # without data, or no TCP:
    (0x06, 0, 0, 0),  # the default class
    (0xB1, 0, 0, 14),
    (0x40, 0, 0, 14),  # A = both ports
    (0x24, 0, 0, 0x9E3779B1),
    (0x02, 0, 0, 0),
    (0x20, 0, 0, 26),  # A = source
    (0x24, 0, 0, 0x85EBCA6B),
    (0x61, 0, 0, 0),
    (0xAC, 0, 0, 0),
    (0x02, 0, 0, 0),
    (0x20, 0, 0, 30),  # A = destination
    (0x24, 0, 0, 0xC2B2AE35),
    (0x61, 0, 0, 0),
    (0xAC, 0, 0, 0),
    (0x74, 0, 0, 32 - (QUEUES - 1).bit_length()),
    (0x04, 0, 0, 1 << 16 | _FIRST),  # class 1:number
    (0x16, 0, 0, 0),
)


def fair_queues(device: str) -> Iterator[str]:
    """Yield the commands that give `device` its queues, for one `tc -batch`, before the rate that
    they share.
    """
    new = f"class add dev {device} parent 1:1 classid"
    # Leaves borrow all of their rate from 1:1. Their own must not be 0.
    borrowing = f"htb rate 8bit ceil 100gbit cburst 1mb quantum {TURN_BYTES}"
    program = ",".join(" ".join(map(str, line)) for line in _CLASS_OF_STREAM)
    yield f"qdisc replace dev {device} root handle 1: htb default 2"
    yield rate_command(device, "1gbit", "16kb")
    yield f"{new} 1:2 {borrowing} prio 0"
    for number in range(_FIRST, _FIRST + QUEUES):
        yield f"{new} 1:{number:x} {borrowing} prio 1"
    yield (
        f"filter add dev {device} parent 1: protocol all bpf bytecode "
        f"'{len(_CLASS_OF_STREAM)},{program}'"
    )


def rate_command(device: str, bits_per_s: str, burst: str) -> str:
    """Return the command that sets the rate that the queues of `device` share, as `tc`
    writes it.
    """
    shape = f"htb rate {bits_per_s} burst {burst} cburst {burst} quantum {TURN_BYTES}"
    return f"class replace dev {device} parent 1: classid 1:1 {shape}"
