#!/bin/bash
# Hosts as namespaces of one machine; tests/hosts/world.py starts this and says what it is for.
#
#   world.sh init LINKS HOST...   process 1 of the world: makes the hosts, prints "ready" and their pids, lives until its input ends
#   world.sh enter HOST COMMAND   runs a command on a host
#   world.sh agent HOST COMMAND   the same as ssh would: joined words for a shell, and none of the caller's variables
set -euo pipefail

self=$(realpath "${BASH_SOURCE[0]}")

init() {
    local links=$1 link host number=0 pids
    shift
    mount -t tmpfs tmpfs /run # the world's own, seen by all its hosts and by nobody else
    echo "127.0.0.1 localhost" >/run/names
    for host; do
        number=$((number + 1))
        echo "10.77.0.$number $host" >>/run/names
    done
    mount --bind /run/names /etc/hosts
    ip link set lo up
    for ((link = 0; link < links; link++)); do
        ip link add "switch$link" type bridge
        ip link set "switch$link" up
    done
    number=0
    pids=()
    for host; do
        number=$((number + 1))
        mkfifo "/run/$host.begun"
        unshare --net --uts --ipc --mount bash "$self" host "$links" "$number" "$host" </dev/null &
        pids+=($!)
        echo $! >"/run/$host.pid"
        read -r _ <"/run/$host.begun" || exit 1
    done
    echo ready "${pids[@]}"
    while read -r _; do :; done # its end is the end of every process here
}

# A host's first process, which holds its namespaces.
host() {
    local links=$1 number=$2 name=$3 link
    hostname "$name"
    mkdir "/run/$name" "/run/$name.cgroup"
    mount -t tmpfs tmpfs /dev/shm
    mount --rbind /sys/fs/cgroup "/run/$name.cgroup"
    mount -t sysfs sysfs /sys # with this host's interfaces
    mount --rbind "/run/$name.cgroup" /sys/fs/cgroup
    ip link set lo up
    for ((link = 0; link < links; link++)); do
        ip link add "eth$link" type veth peer name "$name-$link" netns 1
        nsenter --target 1 --net ip link set "$name-$link" master "switch$link" up
        ip address add "10.77.$link.$number/24" dev "eth$link"
        ip link set "eth$link" up
    done
    echo yes >"/run/$name.begun"
    exec sleep infinity
}

enter() {
    local name=$1
    shift
    export TMPDIR=/run/$name
    if [ ! -e "/run/$name.pid" ]; then
        echo "could not resolve hostname $name" >&2
        exit 255
    fi
    exec nsenter --target "$(<"/run/$name.pid")" --net --uts --ipc --mount --wd="$PWD" -- "$@"
}

agent() {
    local name status=0
    while [[ $1 == -* ]]; do shift; done # options of ssh without a value, as PRRTE gives them
    name=$1
    shift
    (enter "$name" env -i HOME=/run PATH=/usr/sbin:/usr/bin:/sbin:/bin TMPDIR="/run/$name" bash -c "$*") || status=$?
    if [ -e "/run/$name.cut" ]; then # ssh does not hear of it when the other end loses its power
        exec sleep infinity
    fi
    exit "$status"
}

"$@"
