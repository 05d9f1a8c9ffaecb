# Sourced by the launch scripts: runs a job, and waits for it.
# shellcheck shell=sh disable=SC2034  # the scripts that source this read its variables

wait_for_job() { # PID: waits until this background process has ended; sets code to its exit code
    code=0
    while kill -0 "$1" 2>/dev/null; do # a signal ends `wait` before the job is done
        wait "$1" 2>/dev/null && code=0 || code=$?
    done
    # It may have ended while a signal was handled: then code is that of the signal, and its own must still be read.
    wait "$1" 2>/dev/null && code=0 || { last=$?; [ "$last" = 127 ] || code=$last; } # 127: it was read before
}

# How to reach a job; a script redefines what its launcher needs otherwise.
ask_job() { kill -USR1 "$job"; } # to save and leave
end_job() { kill -TERM "$job"; } # at once
after_job() { :; }               # when it has ended; may change code

relay_output() { # from stdin; a job outlives a reader that is gone and a full disk, at which mpirun would end it
    trap '' HUP PIPE TERM
    cat 2>/dev/null || {
        echo "stdout cannot be written; training continues without its console" >&2 || true
        cat >/dev/null
    }
    rm -f "$pipe"
}

run_job() { # COMMAND...: runs it in a session of its own, where Ctrl-C does not reach it; sets code
    job='' signal='' too_early='' pipe='' NOLOCO_LISTENING=''
    if [ -z "${HOSTFILE:-}" ]; then NOLOCO_LISTENING=$(mktemp -d); fi # where ranks of other hosts cannot write
    export NOLOCO_LISTENING
    trap 'on_signal 1' HUP
    trap 'on_signal 2' INT
    trap 'on_signal 15' TERM
    if [ ! -t 1 ]; then
        pipe=$(mktemp -u)
        mkfifo "$pipe"
        relay_output <"$pipe" &
        exec >"$pipe"
    fi
    setsid "$@" </dev/null &
    job=$!
    if [ -n "$signal" ]; then ask_or_end; fi
    wait_for_job "$job"
    after_job
    rm -rf "$NOLOCO_LISTENING"
    exec >&- # the end of what is relayed, but for ranks that a killed launcher has left behind
    for _ in 1 2 3 4 5 6 7 8 9 10; do
        if [ -e "$pipe" ]; then sleep 0.1; fi
    done
    if [ -n "$too_early" ] && [ "$code" != 0 ]; then
        echo "ended before the training began; the same command starts it again" >&2 || true
        code=$((128 + signal))
    fi
}

on_signal() { # NUMBER: the second one ends the job at once
    if [ -n "$signal" ]; then end_job || true; return; fi
    signal=$1
    if [ -n "$job" ]; then ask_or_end; fi
}

ask_or_end() { # until each rank has written a file into NOLOCO_LISTENING, a request would be lost, or kill a rank
    if [ -n "$NOLOCO_LISTENING" ] && [ "$(find "$NOLOCO_LISTENING" -type f | wc -l)" -lt "$ranks" ]; then
        too_early=yes
        end_job || true
    else
        ask_job || true
    fi
}
