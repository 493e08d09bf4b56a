// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/podlace/podlace/integration/meter"
)

// patience is how long to wait for an answer, enough for a slow machine. Without one, the request counts as dropped.
const patience = 5 * time.Second

// server answers every TCP and UDP request with its name and the client's source address.
type server struct {
	name string
	tcp  []net.Listener
	udp  []*net.UDPConn
	done sync.WaitGroup
}

func serve(place meter.Place, name string) (*server, error) {
	s := &server{name: name}
	if err := place(s.listen); err != nil {
		s.close()
		return nil, fmt.Errorf("serve in %s: %w", name, err)
	}
	for _, l := range s.tcp {
		s.done.Go(func() { s.answerTCP(l) })
	}
	for _, c := range s.udp {
		s.done.Go(func() { s.answerUDP(c) })
	}
	return s, nil
}

// listen opens one socket for each address family. One for both is not safe, because Go's package net checks only once, in the first
// namespace that opens a socket, whether the kernel supports it.
func (s *server) listen() error {
	families := []string{"4"}
	if ipv6Error() == nil {
		families = append(families, "6")
	}
	for _, family := range families {
		l, err := net.Listen("tcp"+family, fmt.Sprintf(":%d", httpPort))
		if err != nil {
			return err
		}
		s.tcp = append(s.tcp, l)
		c, err := net.ListenUDP("udp"+family, &net.UDPAddr{Port: dnsPort})
		if err != nil {
			return err
		}
		s.udp = append(s.udp, c)
	}
	return nil
}

func (s *server) close() {
	for _, l := range s.tcp {
		_ = l.Close()
	}
	for _, c := range s.udp {
		_ = c.Close()
	}
	s.done.Wait()
}

func (s *server) answerTCP(l net.Listener) {
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		_ = conn.SetDeadline(time.Now().Add(patience))
		_, _ = io.WriteString(conn, s.answer(conn.RemoteAddr()))
		_ = conn.Close()
	}
}

func (s *server) answerUDP(c *net.UDPConn) {
	question := make([]byte, 64)
	for {
		_, from, err := c.ReadFrom(question)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err == nil {
			_, _ = c.WriteTo([]byte(s.answer(from)), from)
		}
	}
}

func (s *server) answer(from net.Addr) string { return s.name + " " + from.String() }

// An answer is a server's reply.
type answer struct {
	name string     // name of the server
	seen netip.Addr // the caller's address as the server saw it
	took time.Duration
}

// ask connects from a namespace to a server and returns its answer.
func ask(ctx context.Context, from meter.Place, network string, target netip.AddrPort) (answer, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	start := time.Now()
	var conn net.Conn
	err := from(func() (err error) {
		var d net.Dialer
		conn, err = d.DialContext(ctx, network, target.String())
		return err
	})
	if err != nil {
		return answer{}, err
	}
	defer conn.Close()
	text, err := question(ctx, conn, network == "udp")
	if err != nil {
		return answer{}, fmt.Errorf("%s %s: %w", network, target, err)
	}
	a, err := parseAnswer(text)
	a.took = time.Since(start)
	return a, err
}

func question(ctx context.Context, conn net.Conn, datagram bool) (string, error) {
	deadline, _ := ctx.Deadline()
	if err := conn.SetDeadline(deadline); err != nil {
		return "", err
	}
	if datagram {
		if _, err := io.WriteString(conn, "?"); err != nil {
			return "", err
		}
	}
	buffer := make([]byte, 256)
	n, err := conn.Read(buffer)
	return string(buffer[:n]), err
}

func parseAnswer(text string) (answer, error) {
	name, from, _ := strings.Cut(text, " ")
	seen, err := netip.ParseAddrPort(from)
	if err != nil {
		return answer{}, fmt.Errorf("answer %q: %w", text, err)
	}
	return answer{name: name, seen: seen.Addr().Unmap()}, nil
}
