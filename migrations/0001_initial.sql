-- The audit store: what was done, by whom, and how it ended; API keys; usage.
-- Forward only. A change is a new file; an old database is kept as a golden file and migrated in a test.

-- Rows are only ever appended. Each carries the hash of the one before it (see daemon/src/audit/chain.rs).
CREATE TABLE audit (
    seq         INTEGER PRIMARY KEY,
    at_ms       INTEGER NOT NULL,
    kind        TEXT    NOT NULL CHECK (kind IN ('intent', 'outcome', 'event', 'checkpoint')),
    actor       TEXT    NOT NULL,
    role        TEXT    NOT NULL,
    act         TEXT    NOT NULL,
    subject     TEXT    NOT NULL,
    intent      INTEGER,
    outcome     TEXT,
    duration_ms INTEGER,
    detail      TEXT    NOT NULL,
    version     TEXT    NOT NULL,
    prev        BLOB    NOT NULL,
    hash        BLOB    NOT NULL
) STRICT;

CREATE INDEX audit_act ON audit (act, seq);
CREATE INDEX audit_intent ON audit (intent) WHERE intent IS NOT NULL;

-- The last row, written in the same transaction: a cut-off tail shows.
CREATE TABLE audit_head (
    one  INTEGER PRIMARY KEY CHECK (one = 1),
    seq  INTEGER NOT NULL,
    hash BLOB    NOT NULL
) STRICT;

CREATE TABLE api_key (
    id                  TEXT    PRIMARY KEY,
    name                TEXT    NOT NULL,
    scope               TEXT    NOT NULL,
    -- SHA-256 of the key; the key itself is nowhere.
    hash                BLOB    NOT NULL UNIQUE,
    requests_per_minute INTEGER NOT NULL DEFAULT 0,
    tokens_per_minute   INTEGER NOT NULL DEFAULT 0,
    tokens_per_day      INTEGER NOT NULL DEFAULT 0,
    concurrent_requests INTEGER NOT NULL DEFAULT 0,
    -- JSON array of served names; empty: all.
    models              TEXT    NOT NULL DEFAULT '[]',
    created_at          INTEGER NOT NULL,
    expires_at          INTEGER,
    revoked_at          INTEGER
) STRICT;

CREATE UNIQUE INDEX api_key_active_name ON api_key (name) WHERE revoked_at IS NULL;

CREATE TABLE usage_day (
    key_id            TEXT    NOT NULL,
    day               TEXT    NOT NULL,
    requests          INTEGER NOT NULL DEFAULT 0,
    prompt_tokens     INTEGER NOT NULL DEFAULT 0,
    cached_tokens     INTEGER NOT NULL DEFAULT 0,
    completion_tokens INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (key_id, day)
) STRICT, WITHOUT ROWID;
