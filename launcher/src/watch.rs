//! `spd-launch watch RUN...`: serves a live page about runs to browsers of this machine.
//!
//! ```text
//! GET /                           the page
//! GET /news?since=..              changes since the last request, as JSON
//! GET /figure/RUN/STEP/NAME       a figure listed for the run, as SVG
//! GET /components/RUN             a list of its components, as lines of JSON
//! GET /component/RUN/SITE/INDEX   the details of one of them, as JSON
//! GET /probe/RUN/NAME             a prompt that was probed, as JSON
//! ```
//!
//! It listens on 127.0.0.1 only, and answers only requests for a name of this machine, so a foreign
//! page whose name resolves to it (DNS rebinding) is refused. Requests contain no file paths:
//! everything served is found by number and by listed names.

use std::net::{Ipv4Addr, TcpListener};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;
use axum::Router;
use axum::extract::{Path, RawQuery, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use spd_report::Book;
use spd_trainer::Fault;

use crate::cli::WatchArgs;
use crate::exit::Exit;
use crate::report::open;
use crate::screen;

/// The default port, if it is free.
const PORT: u16 = 8420;

/// Minimum interval of reading the runs, for any number of pages.
const POLL: Duration = Duration::from_millis(250);

/// The shared state of all handlers.
type Shared = Arc<Mutex<Served>>;

struct Served {
    book: Book,
    polled: Instant,
}

/// Serves the page until a signal ends it.
///
/// # Errors
///
/// Bad input when a path is not a run, or the requested port is taken; failures of this machine.
pub(crate) fn watch(asked: &WatchArgs) -> Result<Exit, Fault> {
    let book = open(&asked.runs)?;
    let listener = listen(asked.port)?;
    let served = || -> anyhow::Result<()> {
        let place = listener.local_addr()?;
        listener.set_nonblocking(true)?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .build()?;
        let polled = Instant::now();
        let routes = routes(Arc::new(Mutex::new(Served { book, polled })));
        screen::result(&format!(
            "http://{place}/ shows it, on this machine only; Ctrl-C ends it\n"
        ));
        runtime.block_on(async {
            axum::serve(tokio::net::TcpListener::from_std(listener)?, routes).await
        })?;
        Ok(())
    };
    served().context("cannot serve the page")?;
    Ok(Exit::Done)
}

/// A listener on the requested port, or on a free one.
fn listen(port: Option<u16>) -> Result<TcpListener, Fault> {
    let at = |port| TcpListener::bind((Ipv4Addr::LOCALHOST, port));
    let (listener, port) = match port {
        Some(port) => (at(port), port),
        None => (at(PORT).or_else(|_| at(0)), 0),
    };
    listener.map_err(|error| {
        Fault::BadInput(format!(
            "--port {port}: cannot listen on 127.0.0.1:{port}: {error}; without --port a free one is used"
        ))
    })
}

fn routes(shared: Shared) -> Router {
    Router::new()
        .route("/", get(page))
        .route("/news", get(news))
        .route("/figure/{run}/{step}/{name}", get(figure))
        .route("/components/{run}", get(components))
        .route("/component/{run}/{site}/{index}", get(component))
        .route("/probe/{run}/{name}", get(probe))
        .layer(middleware::from_fn(guard))
        .with_state(shared)
}

/// Refuses requests for another host name than this machine's, and forbids browsers to share the
/// answers.
async fn guard(request: Request, next: Next) -> Response {
    let mut response = if !is_of_this_machine(request.headers()) {
        let told = "this page is only for 127.0.0.1 and localhost\n";
        (StatusCode::FORBIDDEN, told).into_response()
    } else if request.method() != Method::GET && request.method() != Method::HEAD {
        StatusCode::METHOD_NOT_ALLOWED.into_response()
    } else {
        next.run(request).await
    };
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CACHE_CONTROL, "no-store"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (
            header::HeaderName::from_static("cross-origin-resource-policy"),
            "same-origin",
        ),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

/// Whether the `Host` of a request is a name of this machine only. The port may differ: that of a
/// tunnel.
fn is_of_this_machine(headers: &HeaderMap) -> bool {
    let mut hosts = headers.get_all(header::HOST).iter();
    let host = hosts.next().and_then(|host| host.to_str().ok());
    let (Some(host), None) = (host, hosts.next()) else {
        return false;
    };
    let is_port = |port: &str| !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    let name = match host.rsplit_once(':') {
        Some((name, port)) if is_port(port) => name,
        _ => host,
    };
    ["127.0.0.1", "localhost", "[::1]"]
        .iter()
        .any(|known| name.eq_ignore_ascii_case(known))
}

async fn page(State(shared): State<Shared>) -> Response {
    let page = on_a_thread(move || held(&shared).book.live_page()).await;
    typed("text/html; charset=utf-8", page)
}

async fn news(State(shared): State<Shared>, RawQuery(query): RawQuery) -> Response {
    let news = move || {
        let query = query.unwrap_or_default();
        let mut watched = held(&shared);
        if watched.polled.elapsed() >= POLL {
            watched.book.poll();
            watched.polled = Instant::now();
        }
        watched
            .book
            .news(query.strip_prefix("since=").unwrap_or_default())
    };
    typed("application/json", on_a_thread(news).await)
}

async fn figure(
    State(shared): State<Shared>,
    Path((run, step, name)): Path<(usize, u64, String)>,
) -> Response {
    let figure = move || held(&shared).book.figure(run, step, &name);
    let figure = on_a_thread(figure).await.flatten();
    let is_drawing = |text: &String| text.trim_start().starts_with('<');
    let kind = match figure.as_ref().is_none_or(is_drawing) {
        true => "image/svg+xml",
        false => "application/json",
    };
    let mut response = typed(kind, figure);
    // A figure opened by itself is a document; the policy keeps it from running scripts.
    let policy = HeaderValue::from_static("default-src 'none'; style-src 'unsafe-inline'; sandbox");
    response
        .headers_mut()
        .insert(header::CONTENT_SECURITY_POLICY, policy);
    response
}

async fn components(State(shared): State<Shared>, Path(run): Path<usize>) -> Response {
    let components = move || held(&shared).book.components(run);
    let kind = "text/plain; charset=utf-8";
    typed(kind, on_a_thread(components).await.flatten())
}

async fn component(
    State(shared): State<Shared>,
    Path((run, site, index)): Path<(usize, String, u64)>,
) -> Response {
    let component = move || held(&shared).book.component(run, &site, index);
    typed("application/json", on_a_thread(component).await.flatten())
}

async fn probe(State(shared): State<Shared>, Path((run, name)): Path<(usize, String)>) -> Response {
    let probe = move || held(&shared).book.probe(run, &name);
    typed("application/json", on_a_thread(probe).await.flatten())
}

fn held(shared: &Shared) -> MutexGuard<'_, Served> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs blocking work on another thread.
async fn on_a_thread<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    tokio::task::spawn_blocking(work).await.ok()
}

fn typed(kind: &'static str, body: Option<String>) -> Response {
    match body {
        Some(body) => ([(header::CONTENT_TYPE, kind)], body).into_response(),
        None => StatusCode::NOT_FOUND.into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_for_other_hosts_are_refused() {
        let answered = |hosts: &[&str]| {
            let mut headers = HeaderMap::new();
            for host in hosts {
                headers.append(header::HOST, HeaderValue::from_str(host).unwrap());
            }
            is_of_this_machine(&headers)
        };
        for host in [
            "127.0.0.1:8420",
            "localhost",
            "LOCALHOST:1",
            "[::1]:8420",
            "[::1]",
        ] {
            assert!(answered(&[host]), "{host}");
        }
        for host in [
            "evil.example",
            "evil.example:8420",
            "127.0.0.1.evil.example",
            "localhost:x",
            "",
            "127.0.0.1@evil:80",
        ] {
            assert!(!answered(&[host]), "{host}");
        }
        assert!(!answered(&[]) && !answered(&["localhost", "evil.example"]));
    }
}
