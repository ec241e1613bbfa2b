"""The five dashboards: every panel and every expression."""

from dashboard_layout import Dashboard, Panel, Query, Show, number

MODEL = '{model=~"$model"}'
SPAN = "[$__rate_interval]"
FINISHED = 'graftline_router_requests_ended_total{model=~"$model", outcome=~"stop|length"}'
FAILED = 'graftline_router_requests_ended_total{model=~"$model", outcome!~"stop|length|cancelled"}'


def rate(metric: str, labels: str = "") -> str:
    """Per second, over Grafana's interval."""
    return f"rate({metric}{labels}{SPAN})"


def total(metric: str, labels: str = "", by: str = "") -> str:
    """The sum of rates, for every value of `by`."""
    return f"sum{f' by ({by})' if by else ''} ({rate(metric, labels)})"


def quantiles(metric: str, labels: str = "") -> tuple[Query, ...]:
    """Median, 90th and 99th percentile of a histogram."""
    buckets = total(f"{metric}_bucket", labels, "le")
    return tuple(Query(f"histogram_quantile({q}, {buckets})", f"p{round(100 * q)}") for q in (0.5, 0.9, 0.99))


def mean(metric: str, labels: str = "", by: str = "") -> str:
    """The mean of a histogram."""
    return f"{total(f'{metric}_sum', labels, by)} / {total(f'{metric}_count', labels, by)}"


def per(top: str, bottom: str, by: str = "instance", labels: str = "") -> str:
    """One counter's growth for each step of another."""
    return f"{total(top, labels, by)} / {total(bottom, labels, by)}"


SERVING = Dashboard(
    "graftline-serving",
    "Graftline: serving",
    "What clients see: latency, throughput, queues, errors, and how much of it keeps to the objectives.",
    (
        number(
            "Finished requests",
            "Requests that ended with stop or length.",
            "reqps",
            Query(f"sum(rate({FINISHED}{SPAN}))", "finished"),
        ),
        number(
            "Goodput",
            "Finished requests whose first token and mean time per later token kept to the objectives.",
            "reqps",
            Query(total("graftline_router_requests_within_objective_total", MODEL), "goodput"),
        ),
        number(
            "Share within objectives",
            "Goodput divided by finished requests.",
            "percentunit",
            Query(
                f"{total('graftline_router_requests_within_objective_total', MODEL)} / sum(rate({FINISHED}{SPAN}))",
                "share",
            ),
        ),
        number(
            "Objectives",
            "What goodput is measured against (router settings).",
            "s",
            Query("max by (objective) (graftline_router_objective_seconds)", "{{objective}}"),
        ),
        Panel(
            "Time to first token",
            "From the request's arrival at the router to its first token.",
            "s",
            quantiles("graftline_router_time_to_first_token_seconds", MODEL),
        ),
        Panel(
            "Time between tokens",
            "Between two messages of a choice, divided by the tokens of the later one and counted for each of them.",
            "s",
            quantiles("graftline_router_inter_token_seconds", MODEL),
        ),
        Panel(
            "Mean time per token, by decode",
            "Time per output token (TPOT) as each decode sends them.",
            "s",
            (Query(mean("graftline_decode_inter_token_seconds", by="instance"), "{{instance}}"),),
        ),
        Panel(
            "Tokens",
            "Output tokens sent, prompt tokens of finished choices, and how many of those a prefix cache had.",
            "short",
            (
                Query(total("graftline_router_completion_tokens_total", MODEL), "output /s"),
                Query(total("graftline_router_prompt_tokens_total", MODEL), "prompt /s"),
                Query(total("graftline_router_cached_tokens_total", MODEL), "cached prompt /s"),
            ),
        ),
        Panel(
            "Requests by outcome",
            "How admitted requests end. Anything but stop, length and cancelled is an error class.",
            "reqps",
            (Query(total("graftline_router_requests_ended_total", MODEL, "outcome"), "{{outcome}}"),),
            Show.STACKED,
        ),
        Panel(
            "Errors and refusals",
            "Failed requests, requests refused before admission, and failed attempts that were tried again elsewhere.",
            "reqps",
            (
                Query(f"sum(rate({FAILED}{SPAN})) or vector(0)", "failed"),
                Query(f"{total('graftline_router_requests_refused_total')} or vector(0)", "refused"),
                Query(f"{total('graftline_router_attempts_failed_total')} or vector(0)", "failed attempts"),
            ),
        ),
        Panel(
            "Open and queued requests",
            "Open at the router; waiting and running at the workers. Prefill queues grow first under long prompts.",
            "short",
            (
                Query("sum(graftline_router_requests_open)", "open at routers"),
                Query("sum by (role) (graftline_worker_queued_requests)", "queued, {{role}}"),
                Query("sum by (role) (graftline_worker_running_requests)", "running, {{role}}"),
            ),
        ),
        Panel(
            "Workers available",
            "Workers that a router may pick. A pair needs one of each role.",
            "short",
            (Query("sum by (role) (graftline_router_worker_available)", "{{role}}"),),
        ),
        Panel(
            "Failover",
            "Workers lost, streams continued on another pair, clients cut because they read too slowly.",
            "short",
            (
                Query(f"{total('graftline_router_worker_lost_total')} or vector(0)", "workers lost /s"),
                Query(total("graftline_router_streams_resumed_total", MODEL), "streams resumed /s"),
                Query(total("graftline_router_slow_consumers_cut_total"), "slow consumers cut /s"),
            ),
        ),
        Panel(
            "Where the first token's time goes",
            "Means: turning text to tokens; start to first token at the prefill (queueing included), at the decode "
            "(the whole handoff), and at the router.",
            "s",
            (
                Query(mean("graftline_router_tokenize_seconds"), "tokenize"),
                Query(mean("graftline_worker_time_to_first_token_seconds", by="role"), "at the {{role}}"),
                Query(mean("graftline_router_time_to_first_token_seconds", MODEL), "at the router"),
            ),
        ),
        Panel(
            "Request duration",
            "Request received to its last message.",
            "s",
            quantiles("graftline_router_request_seconds", MODEL),
        ),
        Panel(
            "Open requests by worker",
            "As the router counts them; an uneven spread means that the policy does not fit the load.",
            "short",
            (Query("sum by (role, worker) (graftline_router_worker_open_requests)", "{{role}} {{worker}}"),),
        ),
    ),
)

_ACCEPTED, _ROUNDS = "graftline_decode_accepted_tokens_total", "graftline_decode_request_rounds_total"
_FIRST_ACCEPTED = "graftline_decode_first_round_accepted_tokens_total"
_FIRST_ROUNDS = "graftline_decode_first_rounds_total"
_LATER = (
    f"({total(_ACCEPTED, by='instance')} - {total(_FIRST_ACCEPTED, by='instance')})"
    f" / ({total(_ROUNDS, by='instance')} - {total(_FIRST_ROUNDS, by='instance')})"
)

SPECULATION = Dashboard(
    "graftline-speculation",
    "Graftline: speculation",
    "Whether drafting pays, and whether handed-over trees are as good as locally grown ones.",
    (
        number(
            "Accept length",
            "Tokens emitted by one verify: accepted drafts + 1.",
            "short",
            Query(f"1 + {total(_ACCEPTED)} / {total(_ROUNDS)}", "accept length"),
        ),
        number(
            "Drafts accepted",
            "Accepted drafts divided by verified ones.",
            "percentunit",
            Query(f"{total(_ACCEPTED)} / {total('graftline_decode_drafted_tokens_total')}", "share"),
        ),
        number(
            "First-round accept length",
            "Of the first round after a handoff: what the prefill's tree is worth. 1 is a cold start.",
            "short",
            Query(f"1 + {total(_FIRST_ACCEPTED)} / {total(_FIRST_ROUNDS)}", "accept length"),
        ),
        number(
            "Tokens a second from rounds",
            "Emitted by decode rounds, all decodes.",
            "short",
            Query(total("graftline_decode_output_tokens_total"), "tokens /s"),
        ),
        Panel(
            "Accept length, by decode",
            "A decode that falls behind the others has another draft head, or other prompts.",
            "short",
            (Query(f"1 + {per(_ACCEPTED, _ROUNDS)}", "{{instance}}"),),
            least=1,
        ),
        Panel(
            "First-round accept length, by origin of the tree",
            "real: grown by the prefill. root_only: the first round only verifies the bonus token.",
            "short",
            (
                Query(
                    "1 + "
                    + per(
                        "graftline_router_first_round_accepted_tokens_total",
                        "graftline_router_first_rounds_total",
                        "tree_origin",
                        MODEL,
                    ),
                    "{{tree_origin}}",
                ),
            ),
            least=1,
        ),
        Panel(
            "Handed-over against local trees",
            "Accept length of first rounds (tree of the prefill) and of later rounds (tree of the decode). A lasting "
            "gap means that the two sides disagree: another draft head, another type, a bug.",
            "short",
            (
                Query(f"1 + {per(_FIRST_ACCEPTED, _FIRST_ROUNDS)}", "handed over, {{instance}}"),
                Query(f"1 + {_LATER}", "local, {{instance}}"),
            ),
            least=1,
        ),
        Panel(
            "Drift of handed-over trees",
            "Accepted drafts of a first round minus those of a later round. Below zero: handed-over trees are worse.",
            "short",
            (Query(f"{per(_FIRST_ACCEPTED, _FIRST_ROUNDS)} - {_LATER}", "{{instance}}"),),
            least=None,
        ),
        Panel(
            "Nodes of a tree",
            "Verified in one round of one request, root included.",
            "short",
            (
                Query(f"1 + {per('graftline_decode_drafted_tokens_total', _ROUNDS)}", "all rounds, {{instance}}"),
                Query(
                    f"1 + {per('graftline_decode_first_round_drafted_tokens_total', _FIRST_ROUNDS)}",
                    "first rounds, {{instance}}",
                ),
            ),
        ),
        Panel(
            "Drafts accepted and wasted",
            "Wasted drafts cost rows of a verify. When they outnumber the accepted ones by far, take a smaller tree.",
            "short",
            (
                Query(total(_ACCEPTED), "accepted /s"),
                Query(f"{total('graftline_decode_drafted_tokens_total')} - {total(_ACCEPTED)}", "wasted /s"),
            ),
            Show.STACKED,
        ),
    ),
)

_SENT, _SEND_TIME = "graftline_prefill_sent_bytes_total", "graftline_prefill_send_seconds_total"
_TAIL = "graftline_prefill_handoff_tail_seconds"
_HANDED_OVER = 'graftline_worker_requests_ended_total{role="prefill", outcome="finished"}'

HANDOFF = Dashboard(
    "graftline-handoff",
    "Graftline: handoff",
    "KV on its way from prefill to decode: speed, what computing hides of it, failures, quarantine.",
    (
        number(
            "Write speed",
            "Acknowledged bytes for each second a write took. Compare with what the link can do.",
            "Bps",
            Query(f"{total(_SENT)} / {total(_SEND_TIME)}", "speed"),
        ),
        number("Handed over", "Acknowledged bytes, all prefills.", "Bps", Query(total(_SENT), "bytes /s")),
        number(
            "Hidden behind computing",
            "Share of writing time that did not delay the end of a handoff: 1 is a handoff that costs nothing.",
            "percentunit",
            Query(f"clamp_min(1 - {total(f'{_TAIL}_sum')} / {total(_SEND_TIME)}, 0)", "hidden"),
        ),
        number(
            "Pages in quarantine",
            "Out of use because a lost prefill might still write to them.",
            "short",
            Query('sum(graftline_worker_pages{role="decode", state="quarantined"})', "pages"),
        ),
        Panel(
            "Write speed, by prefill",
            "One slow prefill is a bad link; all slow ones are a bad network or a bad way (docs/transfer.md).",
            "Bps",
            (Query(per(_SENT, _SEND_TIME), "{{instance}}"),),
        ),
        Panel("Bytes", "Acknowledged bytes a second.", "Bps", (Query(total(_SENT, by="instance"), "{{instance}}"),)),
        Panel(
            "Bytes of a handoff",
            "Acknowledged bytes divided by finished handoffs.",
            "bytes",
            (Query(f"{total(_SENT)} / sum(rate({_HANDED_OVER}{SPAN}))", "bytes"),),
        ),
        Panel(
            "Tail of a handoff",
            "First token to the last acknowledged write. The client has its first token; the second waits for this.",
            "s",
            quantiles(_TAIL),
        ),
        Panel(
            "Overlap",
            "Seconds of writing for each second, and seconds of tails: the part that computing did not hide.",
            "short",
            (Query(total(_SEND_TIME), "writing"), Query(total(f"{_TAIL}_sum"), "not hidden")),
        ),
        Panel(
            "Handoffs by outcome",
            "At the prefill. Cancelled: the client left, or the first token was the whole answer.",
            "reqps",
            (
                Query(
                    total("graftline_worker_requests_ended_total", '{role="prefill"}', "outcome"),
                    "{{outcome}}",
                ),
            ),
            Show.STACKED,
        ),
        Panel(
            "Failed writes",
            "Write orders that failed while their request was wanted, and attempts that failed on the prefill's leg.",
            "short",
            (
                Query(total("graftline_prefill_failed_sends_total"), "writes /s"),
                Query(
                    total("graftline_router_attempts_failed_total", '{leg="prefill"}') + " or vector(0)",
                    "attempts /s",
                ),
            ),
        ),
        Panel(
            "Quarantine",
            "Reservations whose prefill was lost while it could write, and the pages that wait.",
            "short",
            (
                Query(total("graftline_decode_quarantines_total"), "reservations /s"),
                Query(
                    'sum by (instance) (graftline_worker_pages{role="decode", state="quarantined"})',
                    "pages, {{instance}}",
                ),
            ),
        ),
        Panel(
            "Prompt tokens",
            "Computed, found in the prefix cache, and waiting to be computed.",
            "short",
            (
                Query(total("graftline_prefill_computed_tokens_total"), "computed /s"),
                Query(total("graftline_prefill_cached_tokens_total"), "cached /s"),
                Query('sum(graftline_worker_queued_tokens{role="prefill"})', "waiting"),
            ),
        ),
    ),
)

_BUSY = "graftline_worker_stage_busy_seconds_total"

PIPELINE = Dashboard(
    "graftline-pipeline",
    "Graftline: pipeline",
    "How well the stages are kept busy, and by what.",
    (
        Panel(
            "Stage busy",
            "Share of time a stage computes. The busiest one sets the pace.",
            "percentunit",
            (Query(total(_BUSY, by="role, instance, stage"), "{{role}} {{instance}}, stage {{stage}}"),),
        ),
        Panel(
            "Bubbles",
            "Share of time a stage waits. Under full load this is what balance and more microbatches can win.",
            "percentunit",
            (
                Query(
                    f"clamp_min(1 - {total(_BUSY, by='role, instance, stage')}, 0)",
                    "{{role}} {{instance}}, stage {{stage}}",
                ),
            ),
        ),
        Panel(
            "Imbalance",
            "Busiest stage divided by the mean of the stages: 1 is even. Move layers with --layer-split.",
            "short",
            (
                Query(
                    f"max by (role, instance) ({rate(_BUSY)}) / avg by (role, instance) ({rate(_BUSY)})",
                    "{{role}} {{instance}}",
                ),
            ),
            least=1,
        ),
        Panel(
            "Time of a step",
            "Compute time of one step on a stage.",
            "s",
            (
                Query(
                    per(_BUSY, "graftline_worker_stage_steps_total", "role, instance, stage"),
                    "{{role}} {{instance}}, stage {{stage}}",
                ),
            ),
        ),
        Panel(
            "Requests of a microbatch",
            "Requests in one decode round. Full microbatches use the weights best.",
            "short",
            (Query(per(_ROUNDS, "graftline_decode_rounds_total"), "{{instance}}"),),
        ),
        Panel(
            "Rounds and steps",
            "Decode rounds and prefill steps a second.",
            "short",
            (
                Query(total("graftline_decode_rounds_total", by="instance"), "rounds, {{instance}}"),
                Query(total("graftline_prefill_steps_total", by="instance"), "prefill steps, {{instance}}"),
            ),
        ),
        Panel(
            "Prompt tokens of a step",
            "Prompt tokens computed by one prefill step; its bound is --chunk-tokens.",
            "short",
            (Query(per("graftline_prefill_computed_tokens_total", "graftline_prefill_steps_total"), "{{instance}}"),),
        ),
        Panel(
            "Slots in use",
            "Request slots taken, of all there are (--max-running).",
            "percentunit",
            (
                Query(
                    'sum by (role, instance) (graftline_worker_slots{state="used"})'
                    " / sum by (role, instance) (graftline_worker_slots)",
                    "{{role}} {{instance}}",
                ),
            ),
        ),
        Panel(
            "Preemptions",
            "Times a request lost its pages to an older one and was prefilled again: too few pages for the load.",
            "short",
            (Query(total("graftline_decode_preemptions_total", by="instance"), "{{instance}}"),),
        ),
    ),
)

_PAGES = "graftline_worker_pages"
_PLANNED = "graftline_worker_planned_bytes"

MEMORY = Dashboard(
    "graftline-memory",
    "Graftline: memory",
    "The memory plan against what is used, and what a prefill does without.",
    (
        number(
            "Decode pages in use",
            "Of all pages. Cached and free ones can be taken at once.",
            "percentunit",
            Query(f'sum({_PAGES}{{role="decode", state="used"}}) / sum({_PAGES}{{role="decode"}})', "share"),
        ),
        number(
            "Prefill pages in use or cached",
            "A prefill keeps prompts it has seen as long as nobody needs the pages.",
            "percentunit",
            Query(f'sum({_PAGES}{{role="prefill", state=~"used|cached"}}) / sum({_PAGES}{{role="prefill"}})', "share"),
        ),
        number(
            "Planned",
            "Weights and pools of all stages.",
            "bytes",
            Query(f"sum by (role) ({_PLANNED})", "{{role}}"),
        ),
        number(
            "Not taken by prefills",
            "What a decode with the same settings would plan on top: state, graphs and buffers of a verify.",
            "bytes",
            Query('sum(graftline_worker_skipped_bytes{role="prefill"})', "bytes"),
        ),
        Panel(
            "Pages by state, decode",
            "free + used + cached + quarantined is constant.",
            "short",
            (Query(f'sum by (state) ({_PAGES}{{role="decode"}})', "{{state}}"),),
            Show.STACKED,
        ),
        Panel(
            "Pages by state, prefill",
            "Cached pages hold the KV of earlier prompts.",
            "short",
            (Query(f'sum by (state) ({_PAGES}{{role="prefill"}})', "{{state}}"),),
            Show.STACKED,
        ),
        Panel(
            "KV in use",
            "Planned bytes of the target's pages times the share of pages in use or cached.",
            "bytes",
            (
                Query(
                    f'sum by (role, instance) ({_PLANNED}{{part="target_kv"}})'
                    f' * sum by (role, instance) ({_PAGES}{{state=~"used|cached"}})'
                    f" / sum by (role, instance) ({_PAGES})",
                    "{{role}} {{instance}}",
                ),
            ),
        ),
        Panel(
            "Plan by part",
            "What `graftline plan` prints, summed over workers.",
            "bytes",
            (Query(f"sum by (role, part) ({_PLANNED})", "{{role}}: {{part}}"),),
            Show.STACKED,
            width=12,
        ),
        Panel(
            "Plan against process, by stage",
            "Planned bytes, main memory of the stage's process (on CPU: the plan, code, buffers and libraries), "
            "and GPU memory it holds.",
            "bytes",
            (
                Query(f"sum by (role, instance, stage) ({_PLANNED})", "{{role}} {{stage}}: planned"),
                Query("graftline_worker_stage_resident_bytes", "{{role}} {{stage}}: resident"),
                Query("graftline_worker_stage_device_bytes", "{{role}} {{stage}}: GPU"),
            ),
            width=12,
        ),
    ),
)

DASHBOARDS = (SERVING, SPECULATION, HANDOFF, PIPELINE, MEMORY)
