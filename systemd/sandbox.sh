#!/usr/bin/env bash
# Boots a private systemd (its own PID, mount, UTS, IPC and cgroup namespaces, over a throw-away
# overlay of /) and runs a command under it, so that unit files are tested by the real systemd.
# Needs root and Debian's systemd; changes nothing on the host: every write goes to a tmpfs.
#
#   sandbox.sh [-t SECONDS] [-b HOSTDIR:INSIDE]... -- COMMAND [ARG...]
#
# The command runs as root once basic.target is up, with systemctl and journalctl working; its
# output comes back on stdout and its exit status is returned (124 when the time ran out).
# Used by tests/e2e/systemd.rs; nothing of it is installed.
# -b binds a host folder in, writable (for results). Loopback is shared with the host.
set -euo pipefail

limit=120 binds=()
while [[ $# -gt 0 ]]; do
  case $1 in
    -t) limit=$2; shift 2 ;;
    -b) binds+=("$2"); shift 2 ;;
    --) shift; break ;;
    *) echo "usage: sandbox.sh [-t SECONDS] [-b HOSTDIR:INSIDE]... -- COMMAND [ARG...]" >&2; exit 2 ;;
  esac
done
[[ $# -gt 0 ]] || { echo "sandbox.sh: no command" >&2; exit 2; }
[[ $EUID -eq 0 ]] || { echo "sandbox.sh: needs root" >&2; exit 2; }

lot=$(mktemp -d /var/tmp/systemd-sandbox.XXXXXX)
mkdir "$lot/tmpfs" "$lot/result"
: >"$lot/result/output"
printf '%q ' "$@" >"$lot/result/command"
printf '%s\n' "$PWD" >"$lot/result/cwd"
trap 'rm -rf "$lot"' EXIT

cat >"$lot/boot" <<'BOOT'
set -e
lot=$1; shift
mount --make-rprivate /
mount -t tmpfs tmpfs "$lot/tmpfs"
mkdir "$lot/tmpfs/upper" "$lot/tmpfs/work" "$lot/tmpfs/root"
root=$lot/tmpfs/root
mount -t overlay overlay -o "lowerdir=/,upperdir=$lot/tmpfs/upper,workdir=$lot/tmpfs/work" "$root"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
for dir in run tmp dev; do mount -t tmpfs tmpfs "$root/$dir"; done
for node in null zero full random urandom tty; do
  touch "$root/dev/$node"; mount --bind "/dev/$node" "$root/dev/$node"
done
mkdir "$root/dev/shm" "$root/dev/pts" "$root/run/sandbox"
mount -t tmpfs tmpfs "$root/dev/shm"
mount --bind "$lot/result" "$root/run/sandbox"
for pair in "$@"; do
  mkdir -p "$root${pair#*:}"; mount --bind "${pair%%:*}" "$root${pair#*:}"
done
cat >"$root/etc/systemd/system/sandbox.service" <<'UNIT'
[Unit]
Requires=basic.target
After=basic.target
[Service]
Type=oneshot
ExecStart=/bin/bash -c 'cd "$(cat /run/sandbox/cwd)" 2>/dev/null || cd /; source /run/sandbox/command >>/run/sandbox/output 2>&1 </dev/null; echo $? >/run/sandbox/status'
TimeoutStartSec=infinity
UNIT
# nothing of the host's own boot: only what basic.target needs
for unit in systemd-sysctl systemd-remount-fs systemd-update-utmp systemd-udevd systemd-udev-trigger systemd-modules-load systemd-timesyncd systemd-networkd systemd-resolved; do
  ln -sf /dev/null "$root/etc/systemd/system/$unit.service"
done
export container=sandbox PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
exec chroot "$root" /lib/systemd/systemd --system --unit=sandbox.service --log-target=kmsg --log-level=warning --show-status=no
BOOT

unshare --pid --fork --kill-child --mount --uts --ipc --cgroup bash "$lot/boot" "$lot" "${binds[@]}" >"$lot/result/boot.log" 2>&1 &
sandbox=$!
for ((waited = 0; waited < limit * 10; waited++)); do
  [[ -s $lot/result/status ]] && break
  kill -0 "$sandbox" 2>/dev/null || break
  sleep 0.1
done
cat "$lot/result/output"
status=124
if [[ -s $lot/result/status ]]; then
  status=$(cat "$lot/result/status")
elif ! kill -0 "$sandbox" 2>/dev/null; then
  echo "sandbox.sh: the sandbox did not boot:" >&2; tail -n 20 "$lot/result/boot.log" >&2; status=125
else
  echo "sandbox.sh: no answer in $limit s" >&2
fi
disown "$sandbox"; kill -KILL "$sandbox" 2>/dev/null || true
exit "$status"
