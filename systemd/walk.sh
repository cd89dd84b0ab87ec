#!/usr/bin/env bash
# The life of the unit under a real systemd: start, status, reload, broken reload, stalled worker, watchdog, stop.
# Run it as root in a throw-away system that has systemd, with the folder of the binaries and the folder of this file:
#   walk.sh BIN_DIR SYSTEMD_DIR
# Exits 0 when every step was as it should be, and prints the unit's journal.
set -u
bin=$1 units=$2 failed=0 port=18090
ctl() { ernie-ctl --socket /run/ernied/admin.sock "$@"; }
expect() { if [ "$2" = "$3" ]; then echo "ok   $1"; else echo "BAD  $1: got '$2', expected '$3'"; failed=1; fi; }

cp "$bin/ernied" "$bin/ernie-ctl" /usr/bin/
cp "$units/ernied.service" "$units/ernied.socket" /etc/systemd/system/
mkdir -p /usr/lib/sysusers.d /usr/lib/tmpfiles.d /etc/ernied /etc/systemd/system/ernied.service.d
cp "$units/ernied.sysusers" /usr/lib/sysusers.d/ernied.conf
cp "$units/ernied.tmpfiles" /usr/lib/tmpfiles.d/ernied.conf
sed "s/port = 8000/port = $port/" "$units/ernied.toml" >/etc/ernied/ernied.toml
# A sandbox in a container can not make device nodes; the watchdog is shortened so that the walk is.
printf '[Service]\nPrivateDevices=no\nWatchdogSec=10\n' >/etc/systemd/system/ernied.service.d/walk.conf
systemd-sysusers && systemd-tmpfiles --create ernied.conf
chgrp ernied /etc/ernied/ernied.toml && chmod 640 /etc/ernied/ernied.toml
systemctl daemon-reload

systemctl start ernied
expect "start is done when a model serves" "$(curl -sf "localhost:$port/health")" OK
systemctl show -p StatusText --value ernied | grep -q "serving ernie-demo"
expect "the status text says what is served" $? 0

sed -i 's/^format = "text"/format = "text"\nlevel = "debug"/' /etc/ernied/ernied.toml
systemctl reload ernied
expect "a changed setting is applied" "$(ctl logs show | head -1)" "level debug"
sed -i 's/^level = "debug"/level = "=="/' /etc/ernied/ernied.toml
systemctl reload ernied 2>/dev/null
expect "a broken file fails the reload" $? 1
expect "and the old settings stay" "$(ctl logs show | head -1)" "level debug"
expect "and it still serves" "$(curl -sf "localhost:$port/health")" OK
sed -i 's/^level = "=="/level = "info"/' /etc/ernied/ernied.toml
systemctl reload ernied

main=$(systemctl show -p MainPID --value ernied)
worker=$(pgrep -P "$main" | head -1)
kill -STOP "$worker"
for _ in $(seq 40); do kill -0 "$worker" 2>/dev/null || break; sleep 0.5; done
for _ in $(seq 40); do ctl status --check >/dev/null && break; sleep 0.5; done
expect "a stopped worker is replaced" "$(ctl workers --json | grep -c '"restarts": 1')" 1

kill -STOP "$main"
for _ in $(seq 60); do [ "$(systemctl show -p NRestarts --value ernied)" = 1 ] && break; sleep 0.5; done
for _ in $(seq 60); do curl -sf "localhost:$port/health" >/dev/null && break; sleep 0.5; done
expect "a stopped daemon is restarted by the watchdog" "$(systemctl show -p NRestarts,SubState ernied | sort | tr '\n' ' ')" "NRestarts=1 SubState=running "

systemctl stop ernied
expect "stop drains and is clean" "$(systemctl show -p Result,ExecMainStatus ernied | sort | tr '\n' ' ')" "ExecMainStatus=0 Result=success "
systemd-analyze security ernied --no-pager | tail -1
journalctl -u ernied --no-pager -o cat
exit $failed
