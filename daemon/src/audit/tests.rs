//! The store under restarts, manipulation, contention and pruning.

use super::store::Store;
use super::*;
use crate::telemetry::metrics::MetricsSetup;
use ernie_proto::admin::KeyLimits;
use proptest::prelude::*;
use serde_json::json;
use sqlx::{ConnectOptions, Connection, SqliteConnection};
use std::time::Duration;

fn metrics() -> Arc<Metrics> {
    Arc::new(Metrics::new(MetricsSetup {
        model_name: "m".to_owned(),
        engines: 1,
        max_model_len: 100,
        max_num_batched_tokens: 100,
        cache: crate::telemetry::metrics::CacheSettings::default(),
        legacy_names: false,
    }))
}

const KEEP_ALL: AuditConfig = AuditConfig { retention: None, max_bytes: None };

async fn open(dir: &Path) -> AuditHandle {
    start(dir, &KEEP_ALL, metrics()).await.expect("opened")
}

fn intent(act: &'static str, subject: &str) -> Intent {
    Intent {
        actor: Actor::Peer { uid: 1000, gid: 1000, pid: Some(7), exe: Some("/usr/bin/ernie-ctl".to_owned()) },
        role: "admin",
        act,
        subject: subject.to_owned(),
        detail: json!({ "n": 1 }),
    }
}

/// A store with a few finished acts, closed.
async fn filled(dir: &Path, acts: usize) {
    let audit = open(dir).await;
    for n in 0..acts {
        let act = audit.begin(intent("key.create", &format!("app-{n}"))).await.expect("taken");
        act.finish(Ok(json!({ "n": n }))).await;
    }
    audit.close().await;
}

async fn with_sqlite(dir: &Path, sql: String) {
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(dir.join("audit.db"));
    let mut connection = options.connect().await.expect("opened");
    sqlx::query(sqlx::AssertSqlSafe(sql)).execute(&mut connection).await.expect("done");
    connection.close().await.expect("closed");
}

/// Checks what lies on the disk, without writing to it first.
async fn verdict(dir: &Path) -> Verdict {
    let store = Store::open(&dir.join("audit.db")).await.expect("opened");
    AuditReader::new(store.reader().await.expect("reader")).verify().await.expect("checked")
}

#[tokio::test]
async fn an_act_is_an_intent_and_an_outcome_that_hang_together() {
    let dir = tempfile::tempdir().expect("temp");
    let audit = open(dir.path()).await;
    let act = audit.begin(intent("config.set", "logging.level")).await.expect("taken");
    let seq = act.seq();
    assert_eq!(audit.reader().unfinished().await.expect("read"), [seq], "visible before it ends");
    act.finish(Err("refused".to_owned())).await;
    let rows = audit
        .reader()
        .rows(&AuditFilter { act: Some("config".to_owned()), ..AuditFilter::default() })
        .await
        .expect("read");
    assert_eq!(rows.len(), 2);
    assert_eq!((rows[0].kind.as_str(), rows[0].seq), ("intent", seq));
    assert_eq!((rows[1].intent, rows[1].outcome.as_deref()), (Some(seq), Some("failed")));
    assert!(rows[0].actor.contains("uid 1000") && rows[0].actor.contains("/usr/bin/ernie-ctl"), "{}", rows[0].actor);
    assert_eq!(audit.reader().unfinished().await.expect("read"), Vec::<i64>::new());
    assert_eq!(audit.reader().verify().await.expect("checked").broken, None);
}

#[tokio::test]
async fn an_act_that_never_ended_shows_after_the_next_start() {
    let dir = tempfile::tempdir().expect("temp");
    let audit = open(dir.path()).await;
    let act = audit.begin(intent("model.swap", "v2")).await.expect("taken");
    let seq = act.seq();
    drop(act);
    audit.close().await;
    let again = open(dir.path()).await;
    assert_eq!(again.reader().unfinished().await.expect("read"), [seq]);
    again.close().await;
    let rows = open(dir.path())
        .await
        .reader()
        .rows(&AuditFilter { act: Some("daemon".into()), ..AuditFilter::default() })
        .await;
    let started = rows.expect("read").into_iter().rfind(|r| r.act == "daemon.started").expect("a start");
    assert_eq!(started.detail["unfinished"], json!([seq]));
}

#[test]
fn fifty_random_manipulations_are_each_found() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
    let config = ProptestConfig { cases: 50, failure_persistence: None, ..ProptestConfig::default() };
    let fields =
        ["at_ms", "kind", "actor", "role", "act", "subject", "detail", "version", "prev", "hash", "duration_ms"];
    let strategy = (2i64..12, 0usize..4, 0usize..fields.len());
    let template = tempfile::tempdir().expect("temp");
    runtime.block_on(filled(template.path(), 6));
    proptest!(config, |((row, how, field) in strategy)| {
        let dir = tempfile::tempdir().expect("temp");
        std::fs::copy(template.path().join("audit.db"), dir.path().join("audit.db")).expect("copied");
        let field = fields[field];
        let sql = match how {
            0 if field == "kind" => format!("UPDATE audit SET kind = CASE kind WHEN 'event' THEN 'intent' ELSE 'event' END WHERE seq = {row}"),
            0 if field == "prev" || field == "hash" => format!("UPDATE audit SET {field} = x'00' WHERE seq = {row}"),
            0 if field == "at_ms" || field == "duration_ms" => format!("UPDATE audit SET {field} = coalesce({field}, 0) + 1 WHERE seq = {row}"),
            0 => format!("UPDATE audit SET {field} = {field} || 'x' WHERE seq = {row}"),
            1 => format!("DELETE FROM audit WHERE seq = {row}"),
            2 => format!("DELETE FROM audit WHERE seq >= {row}"),
            _ => format!("UPDATE audit SET seq = CASE seq WHEN {row} THEN -1 WHEN {} THEN {row} END WHERE seq IN ({row}, {})", row + 1, row + 1),
        };
        let found = runtime.block_on(async {
            if how == 3 {
                with_sqlite(dir.path(), format!("UPDATE audit SET seq = -1 WHERE seq = {row}")).await;
                with_sqlite(dir.path(), format!("UPDATE audit SET seq = {row} WHERE seq = {}", row + 1)).await;
                with_sqlite(dir.path(), format!("UPDATE audit SET seq = {} WHERE seq = -1", row + 1)).await;
            } else {
                with_sqlite(dir.path(), sql.clone()).await;
            }
            verdict(dir.path()).await
        });
        let (at, why) = found.broken.unwrap_or_else(|| panic!("not found: {sql}"));
        prop_assert!(at <= row + 1, "{sql}: found at {at}: {why}");
    });
}

#[tokio::test]
async fn pruned_rows_are_answered_for_and_a_forged_cut_is_not() {
    let dir = tempfile::tempdir().expect("temp");
    filled(dir.path(), 5).await;
    let mut store = Store::open(&dir.path().join("audit.db")).await.expect("opened");
    let config = AuditConfig { retention: Some(Duration::ZERO), max_bytes: None };
    let gone = retention::apply(&mut store, &config, writer::now_ms() + 1000).await.expect("pruned");
    assert!(gone >= 10, "{gone}");
    store.close().await;
    let after = verdict(dir.path()).await;
    assert_eq!(after.broken, None);
    assert!(after.rows <= 3, "{after:?}");
    with_sqlite(dir.path(), format!("DELETE FROM audit WHERE seq = {}", after.first.expect("rows"))).await;
    assert!(verdict(dir.path()).await.broken.is_some(), "no checkpoint answers for that one");
}

#[tokio::test]
async fn a_changed_retention_counts_without_a_restart() {
    let dir = tempfile::tempdir().expect("temp");
    filled(dir.path(), 5).await;
    let audit = open(dir.path()).await;
    audit.keep(&AuditConfig { retention: Some(Duration::ZERO), max_bytes: None });
    // An act after it: its answer comes when the writer has done what came before.
    audit.begin(intent("a", "after")).await.expect("taken").finish(Ok(json!({}))).await;
    let rows = audit.reader().rows(&AuditFilter::default()).await.expect("read");
    assert!(rows.len() <= 4, "{} rows are left", rows.len());
    assert!(rows.iter().any(|r| r.kind == "checkpoint"));
    assert_eq!(audit.reader().verify().await.expect("checked").broken, None);
}

#[tokio::test]
async fn an_old_database_migrates_with_its_chain_its_keys_and_its_usage() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/audit");
    let mut databases = 0;
    for entry in
        std::fs::read_dir(golden).expect("listed").flatten().filter(|e| e.path().extension().is_some_and(|e| e == "db"))
    {
        databases += 1;
        let dir = tempfile::tempdir().expect("temp");
        std::fs::copy(entry.path(), dir.path().join("audit.db")).expect("copied");
        let audit = open(dir.path()).await;
        let verdict = audit.reader().verify().await.expect("checked");
        assert_eq!(verdict.broken, None, "{entry:?}");
        assert!(verdict.rows >= 10, "{entry:?}: {verdict:?}");
        let keys = audit.reader().keys().await.expect("read");
        let of = |name: &str| keys.iter().find(|k| k.name == name).unwrap_or_else(|| panic!("{name} of {entry:?}"));
        assert_eq!(of("app").limits.requests_per_minute, 600);
        assert!(of("old").revoked_at.is_some());
        let usage = audit.reader().usage("2020-01-01").await.expect("read");
        assert!(usage.iter().any(|row| row.completion_tokens > 0), "{usage:?}");
        audit.begin(intent("a", "after the migration")).await.expect("taken").finish(Ok(json!({}))).await;
        assert_eq!(audit.reader().verify().await.expect("checked").broken, None);
    }
    assert!(databases >= 1, "the golden files are gone");
}

#[tokio::test]
async fn the_store_shrinks_to_its_size_limit_and_stays_verifiable() {
    let dir = tempfile::tempdir().expect("temp");
    filled(dir.path(), 300).await;
    let mut store = Store::open(&dir.path().join("audit.db")).await.expect("opened");
    let (rows, bytes) = store.size().await.expect("size");
    let config = AuditConfig { retention: None, max_bytes: Some(bytes / 2) };
    retention::apply(&mut store, &config, writer::now_ms()).await.expect("pruned");
    let (left, now) = store.size().await.expect("size");
    assert!(left < rows && now <= bytes / 2 + 16_384, "{rows} rows, {bytes} bytes -> {left} rows, {now} bytes");
    store.close().await;
    assert_eq!(verdict(dir.path()).await.broken, None);
}

#[tokio::test]
async fn a_store_that_takes_no_rows_refuses_acts_and_says_so() {
    let dir = tempfile::tempdir().expect("temp");
    let audit = open(dir.path()).await;
    audit.begin(intent("a", "before")).await.expect("taken").finish(Ok(json!({}))).await;
    // Somebody holds the write lock, as a stuck backup would.
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(dir.path().join("audit.db"));
    let mut holder: SqliteConnection = options.connect().await.expect("opened");
    let lock = holder.begin_with("BEGIN IMMEDIATE").await.expect("locked");
    let refused = audit.begin(intent("a", "meanwhile")).await.expect_err("refused");
    assert!(refused.to_string().contains("nothing may be changed"), "{refused}");
    assert!(!audit.healthy());
    lock.rollback().await.expect("let go");
    audit.begin(intent("a", "after")).await.expect("taken again").finish(Ok(json!({}))).await;
    assert!(audit.healthy());
    assert_eq!(audit.reader().verify().await.expect("checked").broken, None);
}

#[tokio::test]
async fn a_burst_of_acts_from_many_tasks_is_one_unbroken_chain() {
    let dir = tempfile::tempdir().expect("temp");
    let audit = open(dir.path()).await;
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..200 {
        let audit = audit.clone();
        tasks.spawn(async move {
            let act = audit.begin(intent("burst", &n.to_string())).await.expect("taken");
            audit.event("burst.event", &n.to_string(), json!({}));
            act.finish(Ok(json!({}))).await;
        });
    }
    tasks.join_all().await;
    audit.close().await;
    let after = verdict(dir.path()).await;
    assert_eq!(after.broken, None);
    assert_eq!(after.rows, 602, "each act two rows and an event, a start and an end");
}

#[tokio::test]
async fn usage_adds_up_over_restarts() {
    let dir = tempfile::tempdir().expect("temp");
    for _ in 0..2 {
        let audit = open(dir.path()).await;
        for _ in 0..3 {
            audit.usage("k_1".into(), Usage { prompt_tokens: 10, cached_tokens: 4, completion_tokens: 5 });
        }
        audit.close().await;
    }
    let rows = open(dir.path()).await.reader().usage("2020-01-01").await.expect("read");
    assert_eq!(rows.len(), 1);
    assert_eq!(
        (rows[0].requests, rows[0].prompt_tokens, rows[0].cached_tokens, rows[0].completion_tokens),
        (6, 60, 24, 30)
    );
}

#[tokio::test]
async fn keys_are_kept_as_digests_only() {
    let dir = tempfile::tempdir().expect("temp");
    let audit = open(dir.path()).await;
    let key = StoredKey {
        id: "k_1".to_owned(),
        name: "app".to_owned(),
        scope: "inference".to_owned(),
        hash: [7; 32],
        limits: KeyLimits { requests_per_minute: 5, ..KeyLimits::default() },
        models: vec!["m".to_owned()],
        created_at: 1,
        expires_at: Some(2),
        revoked_at: None,
    };
    audit.store_key(key.clone()).await.expect("stored");
    assert_eq!(audit.reader().keys().await.expect("read"), std::slice::from_ref(&key));
    audit.revoke_key("k_1".to_owned(), 9).await.expect("revoked");
    assert_eq!(audit.reader().keys().await.expect("read")[0].revoked_at, Some(9));
    audit.close().await;
    use std::os::unix::fs::PermissionsExt;
    let mode = std::fs::metadata(dir.path().join("audit.db")).expect("there").permissions().mode() & 0o777;
    assert_eq!(mode, 0o600);
}

#[tokio::test]
async fn a_damaged_store_is_refused_with_what_to_do() {
    let dir = tempfile::tempdir().expect("temp");
    std::fs::write(dir.path().join("audit.db"), b"this is not a database, whatever its name says. ".repeat(100))
        .expect("written");
    let e = start(dir.path(), &KEEP_ALL, metrics()).await.expect_err("refused").to_string();
    assert!(e.contains("audit.db"), "{e}");
}
