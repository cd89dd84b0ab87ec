//! `top`: a live screen. `State` remembers, `draw` paints; nothing else.

use crate::client::Admin;
use crate::output::{bytes, seconds};
use anyhow::Result;
use ernie_proto::admin::Status;
use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Block, Gauge, Paragraph, Row, Sparkline, Table};
use std::collections::VecDeque;
use std::time::Duration;

/// Points of a curve; wider than any terminal.
const HISTORY_MAX: usize = 512;

/// What is on the screen.
#[derive(Debug, Default)]
struct State {
    status: Option<Status>,
    problem: Option<String>,
    generated: VecDeque<u64>,
    waiting: VecDeque<u64>,
}

impl State {
    fn take(&mut self, status: Status) {
        let push = |curve: &mut VecDeque<u64>, value: u64| {
            if curve.len() == HISTORY_MAX {
                curve.pop_front();
            }
            curve.push_back(value);
        };
        push(&mut self.generated, status.rates.generated_tokens_per_second.max(0.0) as u64);
        push(&mut self.waiting, u64::from(status.requests.waiting + status.requests.held));
        self.status = Some(status);
        self.problem = None;
    }
}

pub(super) async fn run(admin: &Admin, interval: f64) -> Result<()> {
    let interval = Duration::from_secs_f64(interval.clamp(0.1, 60.0));
    let mut state = State::default();
    // The first answer comes before the screen is taken, so that "no daemon" is a plain message.
    state.take(admin.get("/v1/status").await?);
    let mut terminal = ratatui::try_init()?;
    let result = loop {
        if let Err(e) = terminal.draw(|frame| draw(frame, &state)) {
            break Err(e.into());
        }
        match tokio::task::spawn_blocking(move || wants_to_leave(interval)).await {
            Ok(Ok(true)) => break Ok(()),
            Ok(Ok(false)) => {}
            Ok(Err(e)) => break Err(e.into()),
            Err(e) => break Err(e.into()),
        }
        match admin.get("/v1/status").await {
            Ok(status) => state.take(status),
            Err(e) => state.problem = Some(format!("{e:#}")),
        }
    };
    ratatui::restore();
    result
}

/// Waits for a key, at most this long.
fn wants_to_leave(patience: Duration) -> std::io::Result<bool> {
    if !event::poll(patience)? {
        return Ok(false);
    }
    Ok(match event::read()? {
        Event::Key(key) if key.kind == KeyEventKind::Press => {
            matches!(key.code, KeyCode::Char('q') | KeyCode::Esc)
                || (key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL))
        }
        _ => false,
    })
}

fn draw(frame: &mut Frame<'_>, state: &State) {
    let [head, curves, gauges, workers, foot] = Layout::vertical([
        Constraint::Length(4),
        Constraint::Length(7),
        Constraint::Length(3),
        Constraint::Min(4),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    let Some(s) = &state.status else { return };
    header(frame, head, s);
    let [left, right] = Layout::horizontal([Constraint::Fill(1), Constraint::Fill(1)]).areas(curves);
    let title = format!(" generated tokens/s: {:.1} ", s.rates.generated_tokens_per_second);
    curve(frame, left, &title, &state.generated, Color::Green);
    let title = format!(" waiting: {} (running {}) ", s.requests.waiting + s.requests.held, s.requests.running);
    curve(frame, right, &title, &state.waiting, Color::Yellow);
    let [kv, memory] = Layout::horizontal([Constraint::Fill(1), Constraint::Fill(1)]).areas(gauges);
    gauge(frame, kv, " KV cache ", s.kv.usage, format!("{:.1} % of {} blocks", s.kv.usage * 100.0, s.kv.blocks_total));
    let resident = s.memory.workers_resident_bytes + s.memory.daemon_resident_bytes;
    let share = if s.memory.limit_bytes > 0 { resident as f64 / s.memory.limit_bytes as f64 } else { 0.0 };
    gauge(frame, memory, " memory ", share, format!("{} of {}", bytes(resident), bytes(s.memory.limit_bytes)));
    table(frame, workers, s);
    let text = state.problem.clone().unwrap_or_else(|| "q leaves".to_owned());
    let style = if state.problem.is_some() { Style::new().fg(Color::Red) } else { Style::new().fg(Color::DarkGray) };
    frame.render_widget(Paragraph::new(text).style(style), foot);
}

fn header(frame: &mut Frame<'_>, area: Rect, s: &Status) {
    let color = if s.ready { Color::Green } else { Color::Yellow };
    let mut lines = vec![
        Line::from(format!("ernied {} pid {} {} up {}", s.version, s.pid, s.state, seconds(s.uptime_seconds)))
            .style(Style::new().fg(color).add_modifier(Modifier::BOLD)),
    ];
    if let Some(m) = &s.model {
        let kind = if m.moe { format!("MoE {}/{}", m.experts_per_token, m.experts) } else { "dense".to_owned() };
        lines.push(Line::from(format!("{} {} {kind} {} {}", m.name, m.architecture, m.weights, m.isa)));
    }
    let rollout = match &s.rollout.seconds_left {
        Some(left) => format!("rollout: {}, {} left", s.rollout.phase, seconds(*left)),
        None => format!("rollout: {}", s.rollout.phase),
    };
    let hits = s.kv.prefix_hit_rate * 100.0;
    lines.push(Line::from(format!(
        "{rollout}   prefix hits {hits:.1} %   prompt {:.1} tokens/s",
        s.rates.prompt_tokens_per_second
    )));
    lines.extend(s.alarms.first().map(|a| Line::from(format!("! {a}")).style(Style::new().fg(Color::Red))));
    frame.render_widget(Paragraph::new(lines), area);
}

fn curve(frame: &mut Frame<'_>, area: Rect, title: &str, points: &VecDeque<u64>, color: Color) {
    let width = usize::from(area.width.saturating_sub(2));
    let shown: Vec<u64> = points.iter().skip(points.len().saturating_sub(width)).copied().collect();
    let line = Sparkline::default().block(Block::bordered().title(title)).data(&shown).style(Style::new().fg(color));
    frame.render_widget(line, area);
}

fn gauge(frame: &mut Frame<'_>, area: Rect, title: &str, ratio: f64, label: String) {
    let color = if ratio > 0.9 { Color::Red } else { Color::Cyan };
    let gauge = Gauge::default()
        .block(Block::bordered().title(title))
        .gauge_style(Style::new().fg(color))
        .ratio(ratio.clamp(0.0, 1.0))
        .label(label);
    frame.render_widget(gauge, area);
}

fn table(frame: &mut Frame<'_>, area: Rect, s: &Status) {
    let rows = s.workers.iter().map(|w| {
        Row::new([
            w.id.clone().unwrap_or_default(),
            w.pid.map(|p| p.to_string()).unwrap_or_default(),
            w.state.clone(),
            format!("{} running", w.running),
            format!("{} waiting", w.waiting),
            w.last_step_age_seconds.map(seconds).unwrap_or_default(),
            w.resident_bytes.map(bytes).unwrap_or_default(),
            format!("{} restarts", w.restarts),
        ])
    });
    let widths = [6, 8, 11, 12, 12, 10, 11, 12].map(Constraint::Length);
    frame.render_widget(Table::new(rows, widths).block(Block::bordered().title(" workers ")), area);
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    #[test]
    fn the_screen_shows_state_throughput_and_trouble() {
        let status: Status = serde_json::from_value(serde_json::json!({
            "version": "0.1.0", "pid": 7, "state": "serving", "ready": true, "reason": null, "uptime_seconds": 75.0,
            "listening": [], "model": null, "workers": [], "requests": { "running": 3, "waiting": 2, "swapped": 0, "held": 0, "in_flight": 5 },
            "kv": { "block_size": 16, "blocks_total": 100, "blocks_free": 50, "blocks_cached": 0, "usage": 0.5, "prefix_hit_rate": 0.25 },
            "rates": { "generated_tokens_per_second": 123.4, "prompt_tokens_per_second": 0.0, "generated_tokens": 0, "prompt_tokens": 0 },
            "counters": { "workers_lost": 0, "workers_stalled": 0, "requests_resumed": 0, "requests_poisonous": 0, "requests_aborted": 0, "preemptions": 0, "log_lines_dropped": 0 },
            "rollout": { "phase": "steady", "candidate": null, "seconds_left": null, "last": null },
            "memory": { "weights_bytes": 0, "kv_bytes": 0, "workspace_bytes": 0, "workers_resident_bytes": 0, "daemon_resident_bytes": 0, "limit_bytes": 0 },
            "your_role": "admin", "alarms": ["the audit store does not take rows"]
        }))
        .expect("a status");
        let mut state = State::default();
        state.take(status);
        state.problem = Some("no daemon answers".to_owned());
        let mut terminal = Terminal::new(TestBackend::new(100, 24)).expect("a terminal");
        terminal.draw(|f| draw(f, &state)).expect("drawn");
        let screen: String = terminal.backend().buffer().content().iter().map(|c| c.symbol()).collect();
        for wanted in [
            "serving",
            "generated tokens/s: 123.4",
            "waiting: 2 (running 3)",
            "50.0 % of 100 blocks",
            "no daemon answers",
        ] {
            assert!(screen.contains(wanted), "{wanted} is not on the screen");
        }
    }
}
