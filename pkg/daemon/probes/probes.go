// SPDX-License-Identifier: Apache-2.0

// Package probes serves the HTTP endpoints of a daemon: /healthz and /readyz for the kubelet, and /metrics for Prometheus. Package probes
// limits the number of connections and the duration of each request. If another program removes the unix socket of the server, package
// probes creates the socket again.
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

// UnixPrefix is the prefix of an address that contains the path of a unix socket. Only root can use the unix socket at this path. An
// address without UnixPrefix has the form host:port.
const UnixPrefix = "unix:"

// Server answers health probes and scrapes of Prometheus.
type Server struct {
	Ready   func() error // returns why /readyz fails; nil if ready
	Metrics prometheus.Gatherer
	Log     *slog.Logger
}

// Start serves the HTTP endpoints at host:port or unix:/path until ctx is done. For a unix socket, Start also runs a goroutine that removes
// the socket file when ctx is done. The caller can use the WaitGroup in the argument "running" to wait for the end of this goroutine.
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

// AskReady asks a server over HTTP whether it is ready. The readiness probe of a container sends the same request. The argument "address"
// of AskReady is the address at which Start serves the HTTP endpoints. If the server is not ready, the error of AskReady contains the
// reason.
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
