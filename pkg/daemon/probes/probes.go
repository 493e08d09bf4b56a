// SPDX-License-Identifier: Apache-2.0

// Package probes serves a daemon's HTTP endpoints: /healthz and /readyz for the kubelet, /metrics for Prometheus. It limits the number of
// connections and the duration of each request, and creates its unix socket again if another program removes it. It also limits what a
// daemon reads from the API server.
package probes

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// UnixPrefix begins an address that is the path of a unix socket for root only. Other addresses are host:port.
const UnixPrefix = "unix:"

// Server answers health probes and scrapes of Prometheus.
type Server struct {
	Ready   func() error // returns why /readyz fails; nil if ready
	Metrics prometheus.Gatherer
	Log     *slog.Logger
}

// Start serves at host:port or unix:/path until ctx is done. For a unix socket, `running` waits for the goroutine that then removes the
// file.
func (s Server) Start(ctx context.Context, address string, running *sync.WaitGroup) error {
	if path, isUnix := strings.CutPrefix(address, UnixPrefix); isUnix {
		return ServeSocket(ctx, path, s.Log, running, func(ctx context.Context, l *net.UnixListener) { s.serve(ctx, l) })
	}
	l, err := net.Listen("tcp", address)
	if err == nil {
		go s.serve(ctx, l)
	}
	return err
}

func (s Server) serve(ctx context.Context, l net.Listener) {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(s.Metrics, promhttp.HandlerOpts{MaxRequestsInFlight: 4, Timeout: 10 * time.Second}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if err := s.Ready(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	conns := openConns{busy: map[net.Conn]bool{}}
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second, WriteTimeout: 30 * time.Second,
		IdleTimeout: time.Minute, MaxHeaderBytes: 16 << 10, ConnState: conns.track}
	context.AfterFunc(ctx, func() { server.Close() })
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		s.Log.Error("the server of probes and metrics has stopped", "error", err)
	}
}

// AskReady asks the server at the address of Start over HTTP whether it is ready, as the readiness probe of a container does. If it is
// not, the error has the reason.
func AskReady(ctx context.Context, address string) error {
	network, where := "tcp", address
	if path, isUnix := strings.CutPrefix(address, UnixPrefix); isUnix {
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
