#!/bin/bash
# Two hosts, as namespaces that share nothing but a network cable and the disk, run one torchrun each.
# Usage: unshare -Urn --uts hosts.sh DIRECTORY PYTHON APART WORDS...
# A file `cut` in the directory takes the second host away as a power failure would. APART=1 gives it a
# disk of its own. Exit codes of the launchers: code.a, code.b; what they said: told.a, told.b
directory=$1 python=$2 apart=$3
shift 3
hostname hosta
ip link set lo up
ip link add name cable0 type veth peer name cable1
ip addr add 10.77.0.1/24 dev cable0
ip link set cable0 up

launch() { # number, address
    exec env GLOO_SOCKET_IFNAME="cable$1" "$python" -m torch.distributed.run --nnodes 2 --nproc-per-node 1 \
        --rdzv-backend c10d --rdzv-endpoint 10.77.0.1:29400 --rdzv-conf "is_host=$((1 - $1))" --local-addr "$2" \
        -m perdure "${@:3}"
}

second() {
    hostname hostb
    ip link set lo up
    until ip link show cable1 >/dev/null 2>&1; do sleep 0.05; done
    ip addr add 10.77.0.2/24 dev cable1
    ip link set cable1 up
    if [ "$apart" = 1 ]; then mkdir -p "$directory/run"; mount -t tmpfs none "$directory/run"; fi
    launch 1 10.77.0.2 "$@" 2>"$directory/told.b"
}
export -f second launch
export directory python apart

unshare --net --uts --mount --pid --fork --kill-child bash -c 'second "$@"' second "$@" &
b=$!
until [ "$(readlink /proc/$b/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.05; done
ip link set cable1 netns $b

launch 0 10.77.0.1 "$@" 2>"$directory/told.a" &
a=$!
(
    until [ -e "$directory/cut" ]; do sleep 0.05; done
    nsenter -t $b -n ip link set cable1 down
    kill -9 $b
) &
cut=$!
wait $a
echo $? >"$directory/code.a"
wait $b
echo $? >"$directory/code.b"
kill $cut 2>/dev/null
exit 0
