# Sourced by scripts that need two hosts, which are network namespaces joined by a veth pair, or a Slurm.
# shellcheck shell=bash
a=phx-a-$$ b=phx-b-$$

# Whether namespaces can be made here; says why not.
can_make_hosts() {
    [ "$(id -u)" -eq 0 ] || { echo "it needs root"; return 1; }
    command -v ip >/dev/null || { echo "it needs iproute2"; return 1; }
    ip netns add "$a" 2>/dev/null || { echo "network namespaces are not allowed here"; return 1; }
    ip netns del "$a"
}

# have PROGRAM...: whether all are in PATH. (`command -v` is content with one of them.)
have() {
    local program
    for program; do command -v "$program" >/dev/null || return 1; done
}

# make_hosts NETWORK: $a with the address NETWORK.1, and $b with NETWORK.2
make_hosts() {
    local ns
    ip netns add "$a"
    ip netns add "$b"
    ip link add "v$$a" netns "$a" type veth peer name "v$$b" netns "$b"
    ip -n "$a" addr add "$1.1/24" dev "v$$a"
    ip -n "$b" addr add "$1.2/24" dev "v$$b"
    for ns in "$a" "$b"; do ip -n "$ns" link set lo up; done
    ip -n "$a" link set "v$$a" up
    ip -n "$b" link set "v$$b" up
}

# Kills all that runs on them.
remove_hosts() {
    local ns pid
    for ns in "$a" "$b"; do
        for pid in $(ip netns pids "$ns" 2>/dev/null); do kill -9 "$pid" 2>/dev/null || true; done
        ip netns del "$ns" 2>/dev/null || true
    done
}

# slurm_conf CLUSTER CONTROLLER_ADDRESS FOLDER: a configuration without munge, to which the nodes are added
slurm_conf() {
    mkdir -p "$3"/{state,n1,n2}
    cat <<CONF
ClusterName=$1
SlurmctldHost=$(hostname)($2)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
PlugStackConfig=/dev/null
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
ReturnToService=2
StateSaveLocation=$3/state
SlurmdParameters=config_overrides
SlurmdSpoolDir=$3/%n
SlurmdPidFile=$3/%n.pid
SlurmctldPidFile=$3/controller.pid
CONF
}

# slurm_is_up COMMAND...: waits until both nodes are idle; COMMAND... comes before `sinfo`
slurm_is_up() {
    for _ in $(seq 100); do
        [ "$("$@" sinfo -h -t idle -o %D 2>/dev/null)" != 2 ] || return 0
        sleep 0.2
    done
    return 1
}

# The SHA-256 of the weights of a run's folder
weights() { sha256sum <"$1/mnist_cnn.safetensors"; }
