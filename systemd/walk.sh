#!/usr/bin/env bash
# The life of the unit under a real systemd: install, start, status, reload, broken reload, stalled worker, watchdog, socket
# activation across restarts, stop under load. Run it as root in a throw-away system that has systemd (sandbox.sh makes one),
# with the folder of the built binaries and a port that is free:
#   walk.sh BIN_DIR PORT
# Exits 0 when every step was as it should be, and prints the unit's journal.
set -u
bin=$1 port=$2 failed=0
ctl() { ernie-ctl --socket /run/ernied/admin.sock "$@"; }
expect() { if [ "$2" = "$3" ]; then echo "ok   $1"; else echo "BAD  $1: got '$2', expected '$3'"; failed=1; fi; }
holds() { if eval "$2"; then echo "ok   $1"; else echo "BAD  $1: $2"; failed=1; fi; }
wait_for() { for _ in $(seq 240); do eval "$1" >/dev/null 2>&1 && return 0; sleep 0.25; done; return 1; }
state() { systemctl show -p "$1" ernied | sort | tr '\n' ' '; }

mkdir -p /run/walk
CARGO_TARGET_DIR=$(dirname "$bin") "$bin/xtask" install --root / --prefix /usr --profile "$(basename "$bin")" --no-build || exit 1
holds "man pages, completions and an example are installed" \
  "[ -s /usr/share/man/man1/ernie-ctl.1 ] && [ -s /usr/share/bash-completion/completions/ernie-ctl ] && [ -s /usr/share/doc/ernied/ernied.toml.example ]"
sed -i "s/port = 8000/port = $port/" /etc/ernied/ernied.toml
# Some sandboxes can not make device nodes; the watchdog is shortened so that the walk is.
mkdir -p /etc/systemd/system/ernied.service.d
printf '[Service]\nPrivateDevices=no\nWatchdogSec=10\n' >/etc/systemd/system/ernied.service.d/walk.conf
systemd-sysusers && systemd-tmpfiles --create ernied.conf
chgrp ernied /etc/ernied/ernied.toml && chmod 640 /etc/ernied/ernied.toml
systemctl daemon-reload

cp /etc/ernied/ernied.toml /run/walk/good.toml
sed -i 's|^demo = true|path = "/nonexistent"|' /etc/ernied/ernied.toml
systemctl start ernied 2>/dev/null
expect "a model that is not there does not start" "$?" 1
cat /run/walk/good.toml >/etc/ernied/ernied.toml
systemctl reset-failed ernied

systemctl start ernied
expect "start is done when a model serves" "$(curl -sf "localhost:$port/health")" OK
holds "the status text says what is served" "systemctl show -p StatusText --value ernied | grep -q 'serving ernie-demo'"

limit() { ctl config show --json | python3 -c 'import json,sys; print(next(s["value"] for s in json.load(sys.stdin)["settings"] if s["key"] == "limits.max_queued_requests"))'; }
printf '\n[limits]\nmax_queued_requests = 77\n' >>/etc/ernied/ernied.toml
systemctl reload ernied
expect "a reload applies a changed limit" "$(limit)" 77
sed -i 's/^max_queued_requests = 77/max_queued_requests = "many"/' /etc/ernied/ernied.toml
systemctl reload ernied 2>/dev/null
expect "a broken file fails the reload" $? 1
expect "and the old limit stays" "$(limit)" 77
expect "and it still serves" "$(curl -sf "localhost:$port/health")" OK
cat /run/walk/good.toml >/etc/ernied/ernied.toml
systemctl reload ernied

main=$(systemctl show -p MainPID --value ernied)
worker=$(pgrep -P "$main" | head -1)
kill -STOP "$worker"
wait_for "! kill -0 $worker"
wait_for "ctl status --check"
expect "a stopped worker is replaced" "$(ctl workers --json | grep -c '"restarts": 1')" 1
holds "and its flight is written" "[ -n \"\$(ls /var/lib/ernied/flight/*.json 2>/dev/null)\" ]"

kill -STOP "$main"
wait_for '[ "$(systemctl show -p NRestarts --value ernied)" = 1 ]'
wait_for "curl -sf localhost:$port/health"
expect "a stopped daemon is restarted by the watchdog" "$(state NRestarts,SubState)" "NRestarts=1 SubState=running "

# A stream is under way when the unit is stopped: it comes to its end.
curl -sN "localhost:$port/v1/completions" -H 'content-type: application/json' \
  -d '{"prompt":"User: hello\nAssistant: ","max_tokens":1500,"ignore_eos":true,"stream":true}' >/run/walk/stream &
stream=$!
wait_for "[ -s /run/walk/stream ]"
systemctl stop ernied
wait $stream
expect "a stop lets a stream end" "$(tail -c 20 /run/walk/stream | grep -c 'data: \[DONE\]')" 1
expect "and is clean" "$(state Result,ExecMainStatus)" "ExecMainStatus=0 Result=success "

sed -i "s/127.0.0.1:8000/127.0.0.1:$port/" /usr/lib/systemd/system/ernied.socket
systemctl daemon-reload
systemctl start ernied.socket
expect "the first connection starts the daemon" "$(curl -s --max-time 60 -o /dev/null -w '%{http_code}' "localhost:$port/version")" 200
wait_for "curl -sf localhost:$port/health"
cat >/run/walk/connect.py <<'PY'
import socket, sys, threading, time
port, ends = int(sys.argv[1]), []
body = b'{"prompt":"hello","max_tokens":4}'
request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
def one():
    try:
        ends.append(ask())
    except OSError as e:
        ends.append(type(e).__name__)
def ask():
    with socket.create_connection(("127.0.0.1", port), timeout=60) as s:
        s.settimeout(60)
        s.sendall(request)
        answer = b""
        while chunk := s.recv(65536):
            answer += chunk
        return answer.split(b" ")[1].decode() if answer.startswith(b"HTTP/1.1 ") else "cut"
threads = []
for _ in range(200):
    threads.append(threading.Thread(target=one)); threads[-1].start()
    time.sleep(0.02)
for t in threads: t.join()
print(" ".join(f"{end}:{ends.count(end)}" for end in sorted(set(ends))))
PY
python3 /run/walk/connect.py "$port" >/run/walk/ends &
connecting=$!
sleep 1
systemctl restart ernied
wait $connecting
expect "200 connections across a restart: none refused, none cut, each answered at the first try" "$(cat /run/walk/ends)" "200:200"
systemctl stop ernied.socket ernied

systemd-analyze security ernied --no-pager | tail -1
holds "the exposure is below 2.0" "systemd-analyze security ernied --no-pager | tail -1 | grep -oE '[0-9]+\.[0-9]+' | awk '{exit !(\$1 < 2.0)}'"
holds "the journal tells the life" "[ \$(journalctl -u ernied -o cat | grep -cE 'Serving on http|worker lost|setting changed|was not reloaded|drained|Stopped\\.') -ge 6 ]"
journalctl -u ernied --no-pager -o cat
exit $failed
