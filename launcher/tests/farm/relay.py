"""One end of a connection between two network namespaces: forwards packets of a TUN device to the other end over a datagram socket.

While the file FLAG exists, one packet of twenty is lost, and the others are delayed by 50 ms.
usage: relay.py OWN OTHER ADDRESS FLAG
"""

import fcntl
import heapq
import os
import random
import select
import socket
import struct
import subprocess
import sys
import time

own, other, address, flag = sys.argv[1:]
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
tun = os.open("/dev/net/tun", os.O_RDWR)
fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH", b"wire0", IFF_TUN | IFF_NO_PI))
for words in (f"addr add {address} dev wire0", "link set wire0 up"):
    subprocess.run(["ip", *words.split()], check=True)
end = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
end.bind(own)
random.seed(0)
late, number = [], 0


def send(packet):
    try:
        end.sendto(packet, socket.MSG_DONTWAIT, other)
    except OSError:
        # The other end does not exist yet, or is full: the packet is lost.
        pass


while True:
    now = time.monotonic()
    while late and late[0][0] <= now:
        send(heapq.heappop(late)[2])
    ready, _, _ = select.select([tun, end], [], [], late[0][0] - now if late else None)
    if tun in ready:
        packet = os.read(tun, 65536)
        if not os.path.exists(flag):
            send(packet)
        elif random.random() >= 0.05:
            number += 1
            heapq.heappush(late, (time.monotonic() + 0.05, number, packet))
    if end in ready:
        os.write(tun, end.recv(65536))
