
# ---- Below here the file is the same for every run. ----
set -uo pipefail
cd "$code" || exit 2
job=$SLURM_JOB_ID
restarts=${SLURM_RESTART_COUNT:-0}

say() { echo "$(date '+%Y-%m-%d %H:%M:%S') job $job: $*"; }

# One job at a time in a run's folder. An older start of this very job may live on on a lost node.
lock=$run/slurm/.lock
exec 9>>"$lock"
flock -n -E 99 9 2>/dev/null
if [ $? = 99 ] && [ "$(cat "$lock")" != "$job" ]; then
    say "job $(cat "$lock") is at work on this run: not started"
    exit 2
fi
echo "$job" >"$lock"

# A time limit hardly longer than the lead of its signal would end every start after one step.
left=$(squeue --noheader --jobs="$job" --format=%L 2>/dev/null)
case $left in
    '' | *[!0-9:-]*) ;; # none
    *)
        days=0 seconds=0
        case $left in *-*) days=${left%%-*} left=${left#*-} ;; esac
        for part in ${left//:/ }; do seconds=$((60 * seconds + 10#$part)); done
        seconds=$((86400 * days + seconds))
        if [ $((4 * lead)) -gt $((3 * seconds)) ]; then
            say "$seconds s are left of the time limit, and the ranks would be told to stop $lead s" \
                "before it: not started. Give --time or --lead-seconds: $resume"
            exit 2
        fi
        ;;
esac

# The meeting point: the first node, by the address that the cluster itself uses for it, and a port
# below the ephemeral ones that differs between jobs, and between starts, where it may be taken.
# Another launcher's variables mean nothing.
unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE
first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_ADDR=$(scontrol show node "$first_node" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
export MASTER_ADDR=${MASTER_ADDR:-$first_node}
export MASTER_PORT=$((12000 + (job + 7919 * restarts) % 20000))

# Since SLURM 22.05 srun takes a task's number of cores only from this variable.
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_PER_GPU:-1}}
# InfiniBand needs memory that is locked; srun hands this shell's limit, perhaps a login node's, on.
ulimit -S -l "$(ulimit -H -l)"
if [ "${#environment[@]}" -gt 0 ]; then export "${environment[@]}"; fi

# A crash loop: as many attempts as allowed, all from the same checkpoint. A line that begins with
# '#' (written by submit and resume) starts the count anew.
checkpoint=none
for folder in "$run"/checkpoints/step-*; do
    case $folder in *.aside*) continue ;; esac
    if [ -f "$folder/complete.json" ]; then checkpoint=${folder##*/}; fi
done
attempts=$run/slurm/attempts.log
same=0
if [ -f "$attempts" ]; then
    while read -r line; do
        case $line in
            '#'*) same=0 ;;
            *" checkpoint=$checkpoint") same=$((same + 1)) ;;
            *) same=0 ;;
        esac
    done <"$attempts"
fi
if [ "$same" -ge "$max_restarts" ]; then
    say "no progress: $same attempts in a row began at checkpoint $checkpoint; not started again." \
        "Find the reason above, then: $resume"
    exit 2
fi
echo "$(date -u '+%Y-%m-%dT%H:%M:%SZ') job=$job restart=$restarts checkpoint=$checkpoint" >>"$attempts"

say "restart $restarts on $SLURM_JOB_NODELIST, $SLURM_NTASKS ranks meet at" \
    "$MASTER_ADDR:$MASTER_PORT, checkpoint $checkpoint"

# A container can mount only what is there, on each node.
if [ "${#made[@]}" -gt 0 ]; then
    srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
        --mpi=none mkdir -p -- "${made[@]}" 9>&- || say "not made on each node: ${made[*]}"
fi

# Signals to this shell are passed on. Not TERM itself: srun would take it as an order to kill.
interrupted=
terminated=
srun_pid=
# shellcheck disable=SC2317  # the traps call it
pass_on() {
    interrupted=1
    if [ -n "$srun_pid" ]; then kill -USR1 "$srun_pid" 2>/dev/null; fi
}
trap 'pass_on' USR1
trap 'terminated=1; pass_on' TERM

# Seconds after the time limit SLURM kills this shell, too: ranks that are busy must not be waited for.
requeued=
# shellcheck disable=SC2317
requeue_at_limit() {
    case $(squeue --noheader --jobs="$job" --format=%r 2>/dev/null) in
        *TimeLimit) say "the time limit: requeued" && scontrol requeue "$job" && requeued=1 ;;
    esac
}

# --wait: of a task whose slurmstepd was killed srun hears no more; all ranks end at the same time.
begin=$(stat -c %s "$run/slurm/job.log" 2>/dev/null || echo 0)
srun "${srun_options[@]}" --export=ALL --kill-on-bad-exit=1 --wait=60 \
    "$python" -u train.py "$run/slurm/config.yaml" train.resume=auto 9>&- &
srun_pid=$!
while :; do
    interrupted=
    wait "$srun_pid"
    code=$?
    if [ -z "$interrupted" ]; then break; fi
    if [ -n "$terminated" ] && [ -z "$requeued" ]; then requeue_at_limit; fi
done
if [ -n "$requeued" ]; then exit "$code"; fi

# One rank that fails makes srun kill the others and return their code. Its messages tell the first.
first=$(tail -c "+$((begin + 1))" "$run/slurm/job.log" 2>/dev/null |
    LC_ALL=C sed -n 's/.*srun: error: [^:]*: tasks\{0,1\} [^:]*: Exited with exit code \([0-9]*\).*/\1/p; t
            s/.*srun: error: [^:]*: tasks\{0,1\} [^:]*: [A-Z].*/signal/p' | head -n 1)
case $code:$first in
    0:* | *:) ;;
    2:signal | 130:signal) code=1 ;;
    *:signal) ;;
    *) code=$first ;;
esac

# Ranks of an earlier start, on a node that was lost, may still hold the run's checkpoints.
# No pipe: its code would be that of `tail`, which grep leaves before the end of a long log.
if [ "$code" = 2 ] && [ "$restarts" -gt 0 ] &&
    grep -q 'another process trains in it' < <(tail -c "+$((begin + 1))" "$run/slurm/job.log"); then
    code=1
fi

case $code in
    0) say "finished" && exit 0 ;;
    75) why="stopped by a signal, or by what may pass (exit code 75, see above)" ;;
    76) why="hung (exit code 76, see the stacks above)" ;;
    *) why="failed (exit code $code)" ;;
esac
state=$(squeue --noheader --jobs="$job" --format='%T %r' 2>/dev/null)
case $state in
    *TimeLimit*) why="$why, at the time limit" ;;
    RUNNING*) ;;
    *)
        # scancel, a node that failed, preemption: SLURM ends the job and decides what follows.
        if [ -n "$terminated" ] || [ -n "$state" ]; then
            say "$why; SLURM ends the job (${state:-state unknown}): not requeued from here." \
                "To go on after a cancel: $resume"
            # No fault of the run's, so no part of a crash loop.
            echo "# $(date -u '+%Y-%m-%dT%H:%M:%SZ') job=$job ended by SLURM" >>"$attempts"
            exit "$code"
        fi
        ;;
esac
case $code in
    2) say "wrong input or setting (exit code 2, see above): not requeued. Then: $resume" && exit 2 ;;
    130) say "interrupted (exit code 130): not requeued. To go on: $resume" && exit 130 ;;
esac
# Where a node was lost, SLURM may have started the job anew while this script lived on there.
now=$(scontrol show job "$job" 2>/dev/null | sed -n 's/.* Restarts=\([0-9]*\).*/\1/p')
if [ "${now:-$restarts}" != "$restarts" ]; then
    say "$why; SLURM has started the job again meanwhile: not requeued from this start $restarts"
    exit "$code"
fi
say "$why: requeued"
if ! scontrol requeue "$job"; then
    say "SLURM refused to requeue it (see above). To go on: $resume"
fi
exit "$code"
