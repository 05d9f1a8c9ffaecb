# Sourced by the launch scripts: settings of Open MPI and UCX for the network between the replicas, by LAUNCH_PROFILE.
# Open MPI reads them from the environment; mpirun passes OMPI_MCA_* to the other hosts, and what `profile_passes`
# names must be passed as well. With torch.distributed there is nothing to set but NIC: gloo has threads of its own,
# opens all connections at the start, and leaves the sizes of buffers to the kernel.
# shellcheck shell=sh disable=SC2034  # the scripts that source this read its variables
profile_passes=''
case ${LAUNCH_PROFILE:-} in
'') ;; # Open MPI chooses
wan | ethernet)
    # TCP by Open MPI itself: by UCX messages would move only during calls.
    export OMPI_MCA_pml=ob1
    # TCP between hosts, shared memory on a host; without the list every network that is found is a candidate.
    export OMPI_MCA_btl=tcp,self,sm
    # A thread that moves messages while the ranks compute: noloco.overlap_steps needs it.
    export OMPI_MCA_btl_tcp_progress_thread=1
    # Left as they are, since no other value was faster in tests/netlab (a round of 10 MB at 100 Mbit/s and 25 ms: 1.53 s,
    # with others 1.67 to 8.04 s): btl_tcp_sndbuf and btl_tcp_rcvbuf 0 (the kernel fits them to rate x delay),
    # btl_tcp_links 1, eager limits of 64 KiB.
    ;;
ib)
    # Not measured: there was no machine with InfiniBand.
    export OMPI_MCA_pml=ucx
    # All transports but TCP: where UCX finds no adapter the start fails, instead of a run over the slow network.
    export UCX_TLS="${UCX_TLS:-^tcp}"
    # HCOLL speeds up collectives, of which there are none between replicas, and takes memory and time at the start.
    export OMPI_MCA_coll_hcoll_enable=0
    profile_passes="-x UCX_TLS"
    if [ -n "${UCX_NET_DEVICES:-}" ]; then # such as mlx5_0:1; without it UCX takes all adapters
        export UCX_NET_DEVICES
        profile_passes="$profile_passes -x UCX_NET_DEVICES"
    fi
    ;;
*)
    echo "LAUNCH_PROFILE=$LAUNCH_PROFILE is unknown: it must be wan, ethernet or ib" >&2
    exit 2
    ;;
esac
