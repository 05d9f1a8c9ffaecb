# Sourced by the launch scripts: runs a job, and waits for it.
# shellcheck shell=sh disable=SC2034  # the scripts that source this read its variables

wait_for_job() { # PID: waits until this background process has ended; sets code to its exit code
    code=0
    while kill -0 "$1" 2>/dev/null; do # a signal ends `wait` before the job is done
        wait "$1" && code=0 || code=$?
    done
    # It may have ended while a signal was handled: then code is that of the signal, and its own must still be read.
    wait "$1" 2>/dev/null && code=0 || { last=$?; [ "$last" = 127 ] || code=$last; } # 127: it was read before
}

# How to reach a job; a script redefines what its launcher needs otherwise.
ask_job() { kill -USR1 "$job"; } # to save and leave
end_job() { kill -TERM "$job"; } # at once
after_job() { :; }               # when it has ended; may change code

run_job() { # COMMAND...: runs it in a session of its own, where Ctrl-C does not reach it; sets code
    job='' signalled=''
    trap on_signal INT TERM HUP
    setsid "$@" </dev/null &
    job=$!
    [ -z "$signalled" ] || ask_job
    wait_for_job "$job"
    after_job
}

on_signal() { # the second one ends the job at once
    if [ -z "$job" ]; then :; elif [ -z "$signalled" ]; then ask_job || true; else end_job || true; fi
    signalled=yes
}
