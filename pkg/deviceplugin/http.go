// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// serveHTTP answers probes and Prometheus until ctx is done.
func (d *daemon) serveHTTP(ctx context.Context) error {
	registry := prometheus.NewRegistry()
	registry.MustRegister(d.count.allocations, d.count.registrations, d.count.preferred, &state{d, describedMetrics()},
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{MaxRequestsInFlight: 4, Timeout: 10 * time.Second}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if missing := d.ready(); len(missing) > 0 {
			http.Error(w, "the kubelet does not watch "+strings.Join(missing, ", "), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	serve := func(ctx context.Context, l net.Listener) {
		conns := openConns{busy: map[net.Conn]bool{}}
		server := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second, WriteTimeout: 30 * time.Second,
			IdleTimeout: time.Minute, MaxHeaderBytes: 16 << 10, ConnState: conns.track}
		context.AfterFunc(ctx, func() { server.Close() })
		if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			d.log.Error("probes and metrics are not answered any more", "error", err)
		}
	}
	if path, isUnix := strings.CutPrefix(d.HTTP, unixPrefix); isUnix {
		return d.answerAt(ctx, path, func(ctx context.Context, l *net.UnixListener) { serve(ctx, l) })
	}
	l, err := net.Listen("tcp", d.HTTP)
	if err == nil {
		go serve(ctx, l)
	}
	return err
}

// unixPrefix tells the path of a socket, for nobody but root, from host:port.
const unixPrefix = "unix:"

// askReady asks an instance that runs whether the kubelet watches all its resources, as its probe.
func askReady(ctx context.Context, address string) error {
	network, where := "tcp", address
	if path, isUnix := strings.CutPrefix(address, unixPrefix); isUnix {
		network, where = "unix", path
	}
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, network, where)
		}}}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://node/readyz", nil)
	if err != nil {
		return err
	}
	answer, err := client.Do(request)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(io.LimitReader(answer.Body, 1<<20))
	if err == nil && answer.StatusCode != http.StatusOK {
		err = errors.New(strings.TrimSpace(string(text)))
	}
	return err
}
