# Sourced by the launch scripts.
# shellcheck shell=sh disable=SC2034  # the scripts that source this read its variable

wait_for_job() { # PID: waits until this background process has ended; sets code to its exit code
    code=0
    while kill -0 "$1" 2>/dev/null; do # a signal ends `wait` before the job is done
        wait "$1" && code=0 || code=$?
    done
    # It may have ended while a signal was handled: then code is that of the signal, and its own is still to be had.
    wait "$1" 2>/dev/null && code=0 || { last=$?; [ "$last" = 127 ] || code=$last; } # 127: it was had before
}
