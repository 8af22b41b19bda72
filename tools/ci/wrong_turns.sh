#!/usr/bin/env bash
# What people get wrong when they start a job on two hosts, here two network namespaces joined by a veth pair: each
# mistake must end with the right exit codes, and the messages must name it. All run at once, each at its own port.
# Usage: wrong_turns.sh path/to/phalanx
set -euo pipefail
phalanx=$(realpath "$1")
# shellcheck source=tools/ci/hosts.sh
source "$(dirname "$0")/hosts.sh"
why=$(can_make_hosts) || { echo "wrong turns: skipped, $why"; exit 0; }
work=$(mktemp -d)
trap 'remove_hosts; rm -rf "$work" "/etc/netns/$a" "/etc/netns/$b"' EXIT
make_hosts 10.77.0
ip -n "$a" addr add fd77::1/64 dev "v$$a" nodad
ip -n "$b" addr add fd77::2/64 dev "v$$b" nodad
mkdir -p "/etc/netns/$a" "/etc/netns/$b"
# node-a is host a, which finds itself at 127.0.1.1, as Debian's installer has it; host b does so with node-b.
printf '%s\n' "127.0.0.1 localhost" "127.0.1.1 node-a" "10.77.0.1 node-b" >"/etc/netns/$a/hosts"
printf '%s\n' "127.0.0.1 localhost" "10.77.0.1 node-a" "127.0.1.1 node-b" >"/etc/netns/$b/hosts"
for ns in "$a" "$b"; do printf 'hosts: files\n' >"/etc/netns/$ns/nsswitch.conf"; done
# A firewall of host a: port 21000 is closed, and so are the ports that the system chooses.
firewall=
if command -v nft >/dev/null; then
    first=$(cut -f1 /proc/sys/net/ipv4/ip_local_port_range)
    ip netns exec "$a" nft "add table ip t; add chain ip t i { type filter hook input priority 0; };
        add rule ip t i iif v$$a tcp flags & (syn | ack) == syn tcp dport { 21000, $first-65535 } drop" 2>/dev/null && firewall=yes
fi
[ -n "$firewall" ] || echo "skipped: the cases with a firewall need nft"

"$phalanx" token --out "$work/job.token"
"$phalanx" token --out "$work/other.token"
cp "$work/job.token" "$work/loose.token"
chmod 644 "$work/loose.token"
token=(--token-file "$work/job.token")
failed=0
# on HOST NAME COMMAND...: runs it there, with its output and exit code in files of that name.
on() {
    local host=$1 name=$2 code=0 ns=$a
    shift 2
    [ "$host" = a ] || ns=$b
    ip netns exec "$ns" timeout 40 "$@" >"$work/$name.$host" 2>&1 </dev/null || code=$?
    echo "$code" >"$work/$name.$host.code"
}
# node HOST NAME FLAGS... [-- PROGRAM]: a launcher there.
node() {
    local host=$1 name=$2
    shift 2
    local run=(-- true)
    [[ " $* " != *" -- "* ]] || run=()
    on "$host" "$name" "$phalanx" launch --rdzv-timeout 6 "$@" "${run[@]}"
}
# expect NAME HOST CODE TEXT...
expect() {
    local name=$1 host=$2 want=$3 text code
    shift 3
    code=$(cat "$work/$name.$host.code")
    if [ "$code" != "$want" ]; then
        echo "$name: host $host ended with $code, not $want:"
        cat "$work/$name.$host"
        failed=1
    fi
    for text in "$@"; do
        grep -qF -- "$text" "$work/$name.$host" && continue
        echo "$name: host $host does not say '$text':"
        cat "$work/$name.$host"
        failed=1
    done
}
# both NAME FLAGS...: node 0 on host a and node 1 on host b, with the same flags.
both() {
    local name=$1
    shift
    node b "$name" --nnodes 2 --node-rank 1 "$@" &
    node a "$name" --nnodes 2 --node-rank 0 "$@"
    wait
}
at() { echo --master-addr 10.77.0.1 --master-port "$1" --nnodes 2; }

both no-token $(at 20001) &
(node a other-token $(at 20002) --rdzv-timeout 14 "${token[@]}" --node-rank 0 & node b other-token $(at 20002) --rdzv-timeout 14 \
    --token-file "$work/other.token" --node-rank 1; wait) &
node b loose-token $(at 20003) --node-rank 1 --token-file "$work/loose.token" &
node b no-file $(at 20004) --node-rank 1 --token-file "$work/no.token" &
node b host-down --nnodes 2 --node-rank 1 --master-addr 10.77.0.9 "${token[@]}" &
node b node-0-elsewhere $(at 20005) --node-rank 0 "${token[@]}" &
(node a wrong-port $(at 20006) --node-rank 0 "${token[@]}" & node b wrong-port $(at 20007) --node-rank 1 "${token[@]}"; wait) &
both ipv6 --master-addr fd77::1 --master-port 20008 "${token[@]}" -- sh -c 'echo "at $PHALANX_BIND"' &
both debian-a --master-addr node-a --master-port 20009 "${token[@]}" &
both debian-b --master-addr node-b --master-port 20010 "${token[@]}" &
both no-name --master-addr node-x.invalid --master-port 20011 "${token[@]}" &
both late-name --rdzv-timeout 30 --master-addr node-late --master-port 20012 "${token[@]}" -- sh -c 'echo "at $PHALANX_BIND"' &
(node a other-nnodes $(at 20013) --node-rank 0 "${token[@]}" & node b other-nnodes $(at 20013) --nnodes 3 --node-rank 1 "${token[@]}"; wait) &
both uneven $(at 20014) "${token[@]}" --port-range 20014-20015 &
both range $(at 20020) "${token[@]}" --port-range 20020-20023 -- "$phalanx" train mnist --data synthetic:600 \
    --epochs 1 --threads 1 --output-dir "$work/range" &
(node a typo-1 $(at 20060) "${token[@]}" --node-rank 0 & node b typo-1 $(at 20060) "${token[@]}" --node-rank 1 --bogus 1; wait) &
(node a typo-0 $(at 20061) "${token[@]}" --node-rank 0 --bogus 1 & node b typo-0 $(at 20061) "${token[@]}" --node-rank 1; wait) &
(node a twice $(at 20063) --nnodes 3 "${token[@]}" --node-rank 0 & node b twice $(at 20063) --nnodes 3 "${token[@]}" --node-rank 1 &
    sleep 2; node b twice-2 $(at 20063) --nnodes 3 "${token[@]}" --node-rank 1; wait) &
both held $(at 20050) "${token[@]}" --port-range 20050-20053 -- sh -c 'echo "has $MASTER_PORT $PHALANX_PORT_RANGE"' &
if [ -n "$firewall" ]; then
    both blocked-store $(at 21000) "${token[@]}" &
    both blocked-ranks $(at 20030) "${token[@]}" -- "$phalanx" train mnist --data synthetic:600 \
        --epochs 1 --threads 1 --init-timeout 8 --output-dir "$work/blocked" &
fi
rank() { # rank HOST NAME PORT RANK
    on "$1" "$2" "$phalanx" train mnist --data synthetic:600 --epochs 1 --threads 1 --init-timeout 6 \
        --init-method "tcp://$5:$3" --rank "$4" --world-size 3 "${token[@]}" --output-dir "$work/$2"
}
rank a lone-0 20040 0 10.77.0.1 &
rank b lone-1 20041 1 10.77.0.1 &
rank b lone-2 20041 2 10.77.0.1 &
rank b lone-name 20042 1 node-b &
sleep 4
for ns in "$a" "$b"; do echo "10.77.0.1 node-late" >>"/etc/netns/$ns/hosts"; done
wait
# What keepalived and some Kubernetes nodes set: any address can be bound then.
ip netns exec "$b" sysctl -qw net.ipv4.ip_nonlocal_bind=1
by_arrival=(--nnodes 2 --rdzv-backend c10d --rdzv-endpoint 10.77.0.1:20064 "${token[@]}")
(node a nonlocal "${by_arrival[@]}" & node b nonlocal "${by_arrival[@]}"; wait)

for host in a b; do expect no-token $host 2 "need a common job token" "phalanx token --out"; done
expect other-token a 4 "from 10.77.0.2 were refused: they have another job token"
expect other-token b 2 "waiting for the launcher of node 0 at 10.77.0.1:20002: the job token differs" "it has another token"
expect loose-token b 2 "chmod 600"
expect no-file b 2 "phalanx token --out"
expect host-down b 4 "waiting for the launcher of node 0 at 10.77.0.9:29500: " "No route to host"
expect node-0-elsewhere b 2 "10.77.0.1:20005 is not an address of this host" "this one has 10.77.0.2"
expect wrong-port a 4 "waiting for node 1 of 2: it has not connected to 10.77.0.1:20006"
expect wrong-port b 4 "waiting for the launcher of node 0 at 10.77.0.1:20007: connecting: Connection refused"
expect ipv6 a 0 "at fd77::1"
expect ipv6 b 0 "at fd77::2"
expect debian-a a 4 "warning: node-a is 127.0.1.1 on this host (see /etc/hosts)" "--bind 10.77.0.1" \
    "it has not connected to 127.0.1.1:20009, which no other host can reach"
expect debian-b b 4 "warning: node-b is 127.0.1.1 on this host (see /etc/hosts)"
expect no-name a 4 "waiting for the name node-x.invalid to resolve on this host" "--master-addr 10.77.0.1"
expect no-name b 4 "waiting for the launcher of node 0 at node-x.invalid:20011: resolving the host name"
expect late-name a 0 "at 10.77.0.1"
expect late-name b 0 "at 10.77.0.2"
expect other-nnodes a 4 "was started with --nnodes"
expect other-nnodes b 2 "was started with --nnodes"
expect uneven a 2 "--port-range 20014-20015 is too narrow: node 0 needs 3 free ports"
expect uneven b 4 "waiting for the launcher of node 0 at 10.77.0.1:20014"
expect typo-1 a 4 "node 1 of 2 did not join"
expect typo-1 b 2 "--bogus"
expect typo-0 a 2 "--bogus"
expect typo-0 b 4 "waiting for the launcher of node 0 at 10.77.0.1:20061"
for host in a b; do expect twice $host 4 "node 2 of 3 did not join"; done
expect twice-2 b 2 "error: node 1 has already joined: host "
for host in a b; do expect nonlocal $host 0; done
expect range a 0 "2 ranks over TCP"
expect range b 0
# The last port is held for the program of rank 0, so no rank may take it.
for host in a b; do expect held $host 0 "has 20053 20050-20052"; done
if [ -n "$firewall" ]; then
    expect blocked-store a 4 "it has not connected to 10.77.0.1:21000"
    expect blocked-store b 4 "waiting for the launcher of node 0 at 10.77.0.1:21000: connecting: connection timed out"
    expect blocked-ranks a 4 "for rank 1 to connect to 10.77.0.1:" "--port-range"
    expect blocked-ranks b 4 "for rank 0 to answer at 10.77.0.1:" "connection timed out" "--port-range"
fi
expect lone-0 a 4 "for ranks 1, 2 of 3 to arrive (the store at 10.77.0.1:20040); they have not connected to it"
grep -hF "for the store of rank 0 at 10.77.0.1:20041 (connecting: Connection refused" "$work/lone-1.b" "$work/lone-2.b" >"$work/lines" || true
ranks=$(grep -lF "forming the group: waiting" "$work/lone-1.b" "$work/lone-2.b" | wc -l || true)
{ [ -s "$work/lines" ] && [ "$ranks" = 1 ]; } || { echo "$ranks of two waiting ranks of a host say so"; cat "$work"/lone-[12].b; failed=1; }
expect lone-name b 4 "warning: node-b is 127.0.1.1 on this host (see /etc/hosts)"
[ "$failed" = 0 ] && echo "wrong turns: ok, $SECONDS s"
exit "$failed"
