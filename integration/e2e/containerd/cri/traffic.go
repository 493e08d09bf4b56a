// SPDX-License-Identifier: Apache-2.0

package cri

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/meter"
)

// OutsideNetns is the network namespace at the other end of the node's eth0.
const OutsideNetns = "/run/netns/outside"

// Place returns a function that runs code in the network namespace at a path; "" is that of this process.
func Place(path string) meter.Place {
	if path == "" {
		return meter.Here
	}
	return func(f func() error) error {
		done := make(chan error)
		go func() {
			runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
			err := enter(path)
			if err == nil {
				err = f()
			}
			done <- err
		}()
		return <-done
	}
}

func enter(path string) error {
	ns, err := os.Open(path)
	if err != nil {
		return err
	}
	defer ns.Close()
	if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("enter %s: %w", path, err)
	}
	return nil
}

// httpClient returns an HTTP client that dials from the network namespace.
func httpClient(netns string) *http.Client {
	dialer := net.Dialer{Timeout: 3 * time.Second}
	dial := func(ctx context.Context, network, address string) (conn net.Conn, err error) {
		err = Place(netns)(func() error {
			conn, err = dialer.DialContext(ctx, network, address)
			return err
		})
		return conn, err
	}
	return &http.Client{
		Timeout:   5 * time.Second,
		Transport: &http.Transport{DisableKeepAlives: true, DialContext: dial},
	}
}

// ServeAddress starts a server in a network namespace that sends each client its own address, and returns the URL.
func ServeAddress(t *testing.T, netns string, addr netip.Addr) string {
	t.Helper()
	var l net.Listener
	err := Place(netns)(func() (err error) {
		l, err = net.Listen("tcp", netip.AddrPortFrom(addr, 0).String())
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	answer := func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, r.RemoteAddr) }
	go func() { _ = http.Serve(l, http.HandlerFunc(answer)) }() // ends with the listener
	return "http://" + l.Addr().String() + "/"
}

// Get fetches a URL from the network namespace. It retries for 3 s, because a new container's server does not accept connections at once.
func Get(ctx context.Context, netns, url string) (string, error) {
	var body string
	err := Eventually(ctx, 3*time.Second, func() error {
		r, err := httpClient(netns).Get(url)
		if err != nil {
			return err
		}
		defer r.Body.Close()
		data, err := io.ReadAll(r.Body)
		body = strings.TrimSpace(string(data))
		return err
	})
	return body, err
}

// Eventually calls f repeatedly until f succeeds or the time limit passes.
func Eventually(ctx context.Context, limit time.Duration, f func() error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		err := f()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(50 * time.Millisecond):
		}
	}
}
